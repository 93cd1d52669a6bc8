"""The report's human side says what it must."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from exitserve.bench.page import markdown, plot, short_table
from exitserve.reporting.report import terminal_table


def case(mode: str, batch: int, *, wall: float = 1.0, depth: float = 1.0) -> dict[str, Any]:
    return {
        "batch_size": batch,
        "mode": mode,
        "rival": "draft:cut" if mode == "rival" else None,
        "exit_threshold": 0.5 if mode in {"confidence", "verify"} else None,
        "exit_layer": 2 if mode == "fixed" else None,
        "tokens_per_second": 100.0 * wall,
        "tpot_ms": {"median": 10.0 / wall, "p99": 12.0},
        "tokens_at_once": 1.0,
        "mean_depth": 4.0 / depth,
        "mean_layers_run": 4.0,
        "depth_speedup": depth,
        "wall_speedup": {"median": wall, "min": wall - 0.05, "max": wall + 0.1},
        "load_wall_speedup": {"median": wall - 0.1, "min": wall - 0.2, "max": wall},
        "limit_speedup": None if mode == "rival" else depth,
        "efficiency": None if mode == "rival" else wall / depth,
        "agreement": None if mode == "fixed" else 0.987,
        "perplexity": None if mode == "fixed" else 1.234,
        "drafted": 40 if mode in {"verify", "rival"} else None,
        "accepted": 38 if mode in {"verify", "rival"} else None,
        "drafted_from_text": {"verify": 10, "rival": 0}.get(mode),
        "accepted_from_text": {"verify": 9, "rival": 0}.get(mode),
        "exit_layers": {"2": 3, "4": 1},
    }


def report(*, synthetic: bool = False, notes: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "model": "some-model",
        "synthetic": synthetic,
        "machine": {"cpu": "a cpu", "cores": 2, "memory_gib": 8.0, "gpus": []},
        "versions": {"python": "3.11"},
        "settings": {
            "num_layers": 4,
            "exit_layers": [2],
            "requests": 8,
            "prompts": "bundled prompts",
            "max_tokens": 64,
            "repeats": 3,
            "exit_rows": "frequent",
            "seconds": 2.0,
            "dtype": "float32",
            "compile": "compiled",
            "prefix_caching": False,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "forced": None,
            "gpu_memory": {"engines": 3, "utilization": 0.92, "each": 0.3},
            "rivals": {"draft:cut": {"weight_bytes": 2_000_000, "cache_bytes_per_token": 768}},
        },
        "notes": list(notes),
        "cases": [
            entry
            for batch in (1, 8)
            for entry in (
                case("plain", batch),
                case("off", batch),
                case("confidence", batch, wall=1.3, depth=1.6),
                case("fixed", batch, wall=1.6, depth=2.0),
                case("verify", batch, wall=1.2),
            )
        ],
    }


def test_the_page_has_the_table_the_conditions_and_no_bare_speedup() -> None:
    page = markdown(report())
    assert "prefix caching off" in page
    assert "3 engines shared 0.92 of the GPU's memory: each had 0.300." in page
    assert "Exits are off" not in page, "only on a CPU"
    assert "threshold 0.5" in page
    assert "0.987" in page
    assert "a cpu" in page
    assert "SYNTHETIC" not in page
    for before in (part[-6:] for part in page.lower().replace("_", " ").split("speedup")[:-1]):
        assert before.endswith(("depth ", "wall ")), before


def test_synthetic_is_said_on_the_page_and_the_plot() -> None:
    data = report(synthetic=True)
    assert markdown(data).count("SYNTHETIC") >= 2
    title = plot(data).get_suptitle()
    assert "SYNTHETIC" in title


def test_drafts_are_told() -> None:
    assert "38 of 40" in markdown(report())


def test_forced_outcomes_are_said_on_the_page() -> None:
    data = report(synthetic=True)
    assert "FORCED" not in markdown(data)
    data["settings"]["forced"] = {"confidence": 0.8, "acceptance": 0.97}
    page = markdown(data)
    assert "FORCED" in page and "0.8" in page and "0.97" in page


def test_notes_become_warnings() -> None:
    assert "> **Warning.** look here" in markdown(report(notes=("look here",)))


def test_the_terminal_table_fits_80_characters_unbroken() -> None:
    cases = report()["cases"]
    cases[0] |= {"mode": "confidence", "exit_threshold": "auto:0.95"}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal_table("title", *short_table(cases)))
    text = console.export_text()
    assert "…" not in text
    assert "threshold auto:0.95" in text
    assert "1.55-1.70" in text
