"""What `exitserve demo` shows and compares, by what the checkpoint promises; nothing is started."""

import json
from pathlib import Path
from typing import Any

import pytest

from exitserve.checkpoint.block import MultiExit, write_multi_exit
from exitserve.checkpoint.calibration import OperatingPoint
from exitserve.demo import compared, shown, verdict

from ..shapes import calibration_of


@pytest.fixture
def promising(tmp_path: Path) -> Path:
    """A checkpoint that promises 0.98, and 0.95 too; without weights."""
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 12}))
    layers = (3, 6, 9)
    better, cheaper = (
        OperatingPoint(
            agreement=agreement,
            thresholds=dict.fromkeys(layers, threshold),
            eos_thresholds=dict.fromkeys(layers, 1.0),
        )
        for agreement, threshold in ((0.98, 0.8), (0.95, 0.6))
    )
    calibration = calibration_of(better, cheaper, num_layers=12)
    write_multi_exit(tmp_path, MultiExit(exit_layers=layers, calibration=calibration))
    return tmp_path


def test_promises_are_shown_where_there_are_any(promising: Path) -> None:
    assert shown(promising) == {
        "full depth": {"exit_mode": "off"},
        "promised 98% of full depth's tokens": {"exit_threshold": "auto"},
        "promised 95% of full depth's tokens": {"exit_target": 0.95},
    }
    options = ["--thresholds", "auto,auto:0.95,0.5", "--modes", "verify"]
    assert compared(promising) == options


def test_thresholds_are_tried_where_there_are_none(bundled: Path) -> None:
    assert list(shown(bundled)) == ["full depth", "exit threshold 0.7", "exit threshold 0.4"]
    assert compared(bundled) == ["--thresholds", "0.7,0.4"]


def test_the_verdict_names_the_best_at_each_batch_size() -> None:
    def case(mode: str, size: int, wall: float) -> dict[str, Any]:
        spread = {"median": wall, "min": wall - 0.1, "max": wall + 0.1}
        named = {"mode": mode, "batch_size": size, "exit_threshold": 0.7}
        return named | {"wall_speedup": spread, "agreement": 0.981}

    cases = [case("plain", 1, 1.0), case("confidence", 1, 1.2), case("defer", 1, 1.3)]
    cases += [case("off", 8, 1.1), case("confidence", 8, 0.9), case("defer", 8, 0.8)]
    first, second, calls, reason = verdict(cases)
    assert "one request at a time, defer 0.7 has the best wall speedup: 1.30 (1.20" in first
    assert first.endswith("98.1% equal to full depth's.")
    assert "8 requests together, threshold 0.7 has the best wall speedup: 0.90" in second
    assert second.endswith("(Exits off: 1.10.)")
    assert "nothing to do with exits" in calls
    assert "less to gain" in reason
