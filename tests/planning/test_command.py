"""`exitserve plan` from the command line, on a config.json alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from exitserve.cli import main
from exitserve.costs.devices import DEVICES

LLAMA_3_8B: dict[str, Any] = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
TINY: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "multi_exit": {"version": 1, "exit_layers": [1, 2]},
}


def written(folder: Path, config: object, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return written(tmp_path, LLAMA_3_8B)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements of a fraction of a second."""
    monkeypatch.setattr("exitserve.costs.timing.SECONDS", 0.05)


def test_the_plan_of_a_table(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["plan", str(llama.parent), "--device", "h200", "--out", str(out)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "A check costs 0.4 layers" in printed
    assert "unverified" in printed
    assert "Batch 1: exits that skip layers can pay" in printed
    assert "Batch 32: exits that skip layers CANNOT pay" in printed
    assert (
        "Batch 32: serve in mode verify (or defer), where the first 6 layers draft 1 at a time"
        in printed
    )
    assert (out / "plan.png").stat().st_size > 10_000
    page = (out / "report.md").read_text(encoding="utf-8")
    assert "CANNOT" in page
    data = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert data["schema_version"] == 1
    assert not data["measured"]
    assert data["way"] == "masked"
    assert data["recommended"] == data["best"]["layers"]
    eighth = data["exit_layers"][7]
    assert eighth["exit_layer"] == 8
    # 24 of 32 layers, each 2 * 8 heads * 128 numbers of 2 bytes.
    assert eighth["kv_copy_bytes_per_token"] == 24 * 4096
    assert eighth["kv_copy_share"] == 0.75
    first = eighth["batches"][0]
    assert first["best_speedup"] == pytest.approx(2.99, abs=0.01)
    assert first["masked"]["break_even_share"] == pytest.approx(0.015, abs=0.001)
    assert first["masked"]["speedup_at_share"] == pytest.approx(1.49, abs=0.01)


def test_a_file_of_any_name_is_a_model(tmp_path: Path) -> None:
    path = written(tmp_path, LLAMA_3_8B, "llama.json")
    assert main(["plan", str(path), "--device", "l40s", "--batch-sizes", "2"]) == 0


def test_the_plan_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tiny shape, timed; its checkpoint's own exit layers are judged too."""
    path, out = written(tmp_path, TINY), tmp_path / "out"
    arguments = [str(path), "--batch-sizes", "1,3", "--context", "64", "--out", str(out)]
    assert main(["plan", *arguments]) == 0
    assert "1, 2 (the checkpoint's), batch 3" in capsys.readouterr().out
    data = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert data["measured"]
    assert data["dtype"] == "bfloat16"
    assert data["declared"]["layers"] == [1, 2]
    for cost in data["costs"]:
        parts = ("layer_ms", "fill_ms", "check_ms", "head_ms", "full_depth_ms")
        assert all(cost[part] > 0 for part in parts)
        assert cost["check_ms"] > cost["head_ms"]
        full = 4 * cost["layer_ms"] + cost["head_ms"] + cost["rest_ms"]
        assert cost["full_depth_ms"] == pytest.approx(full, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "h300"], ["h300", "Did you mean", *DEVICES]),
        (["--batch-sizes", "0"], ["--batch-sizes must be at least 1"]),
        (["--batch-sizes", "1,1"], ["each once"]),
        (["--batch-sizes", "one"], ["numbers separated by commas"]),
        (["--batch-sizes", "1000"], ["at most 512"]),
        (["--context", "9000"], ["--context 9000", "0..8192"]),
        (["--context", "-1"], ["--context -1"]),
        (["--dtype", "int8"], ["int8", "bfloat16"]),
        (["--dtype", "float32", "--device", "h100"], ["--dtype bfloat16"]),
        (["--exit-share", "0"], ["--exit-share"]),
    ],
)
def test_bad_arguments_give_one_line(
    llama: Path, arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(llama), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(word in said for word in words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "num_attention_heads = None"),
        ([1], "must hold a JSON object"),
        ({**TINY, "num_hidden_layers": 1, "multi_exit": None}, "one layer"),
        ({**TINY, "multi_exit": {"version": 1, "exit_layers": [2, 4]}}, "exit layer 4"),
        ({**TINY, "num_experts_per_tok": 2}, "give --batch-sizes 1"),
        ({**TINY, "hidden_size": 10**7}, "GiB"),
    ],
)
def test_bad_models_give_one_line(
    tmp_path: Path, config: object, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(written(tmp_path, config))]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert words in said


def test_importing_the_command_loads_nothing_heavy() -> None:
    code = (
        "import sys; import exitserve.planning.command, exitserve.costs.sources;"
        "print(sorted({'torch', 'vllm', 'matplotlib', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
