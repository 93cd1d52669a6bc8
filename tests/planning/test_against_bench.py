"""The comparison of `plan` with `bench`: which prediction belongs to which case."""

from typing import Any

import pytest

from exitserve.costs.curves import Curve, StepCosts

from ..scripts import ROOT, script

SCRIPT = ROOT / "benchmarks" / "plan_against_bench.py"


def flat(seconds: float, more: float = 0.0) -> Curve:
    return Curve(((1, seconds), (8, seconds + 7 * more)))


COSTS = StepCosts(
    num_layers=24,
    matrices=flat(1.0, 0.1),
    attention=flat(0.0),
    fill=flat(0.125),
    check=flat(3.0),
    head=flat(2.0),
    rest=flat(1.0),
    exits=flat(0.5),
)


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return script(SCRIPT)


def case(mode: str, batch: int, **more: Any) -> dict[str, Any]:
    """As `bench` reports it."""
    return {
        "mode": mode,
        "batch_size": batch,
        "exit_layer": 6,
        "wall_speedup": {"median": 2.0, "min": 1.9, "max": 2.1},
        "tpot_ms": {"median": 10.0},
        **more,
    }


EXITS = 1.5 + 6 + 18 * 0.125 + 2
"""A step of one row that leaves after 6 layers unconditionally."""


@pytest.mark.parametrize(
    ("found", "seconds"),
    [
        (case("fixed", 1), EXITS),
        (
            case("confidence", 1, exit_layers={"6": 80, "24": 20}),
            1.5 + 6 + 3 + 0.8 * 18 * 0.125 + 0.2 * (18 + 2),
        ),
    ],
)
def test_a_case_is_predicted_by_hand(compare: Any, found: dict[str, Any], seconds: float) -> None:
    row = compare._compared("llama-350m", found, COSTS)
    full = COSTS.full(found["batch_size"])
    assert row["predicted"] == pytest.approx(full / seconds, abs=1e-4)
    assert row["predicted_ms"] == pytest.approx(1e3 * seconds)
    assert row["error"] == pytest.approx(full / seconds / 2.0 - 1.0, abs=1e-4)
    assert len(compare._line(row)) == len(compare.HEADERS)
