"""Which exit layers are chosen, and when exits are said not to pay."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitserve.costs.curves import Curve, StepCosts
from exitserve.costs.skipping import expected_seconds
from exitserve.planning.recommend import (
    MOST_LAYERS,
    WORTH,
    choose_layers,
    left_by,
    shares_at,
    verdict,
)


def flat(seconds: float, more: float = 0.0) -> Curve:
    """`seconds` for a row, `more` for each further one."""
    return Curve(((1, seconds), (64, seconds + 63 * more)))


def costs(
    *, check: float = 1.0, layers: int = 12, rest: float = 0.0, row: float = 0.0
) -> StepCosts:
    """Layers of one second, of which each further row takes `row` more."""
    return StepCosts(
        num_layers=layers,
        matrices=flat(1.0, row),
        attention=flat(0.0),
        fill=flat(0.05, row / 20),
        check=flat(check),
        head=flat(check),
        rest=flat(rest),
        exits=flat(rest / 4),
    )


def test_the_curve_is_that_of_the_bundled_model() -> None:
    assert [left_by(depth) for depth in (0, 0.25, 0.5, 0.75, 1)] == [0, 0.4, 0.7, 1, 1]
    assert left_by(0.125) == pytest.approx(0.2)
    shares = shares_at((3, 6, 9), 12, 0.405)
    assert [round(share, 2) for share in shares.values()] == [0.16, 0.12, 0.12]


@pytest.mark.parametrize("check", [0.05, 0.3, 1.0, 4.0])
@pytest.mark.parametrize(("batch", "compacts"), [(1, True), (3, True), (3, False)])
def test_no_choice_of_as_many_layers_is_better(check: float, batch: int, compacts: bool) -> None:
    found = costs(check=check, layers=9)
    chosen = choose_layers(found, batch, 0.6, compacts=compacts)

    def seconds(layers: tuple[int, ...]) -> float:
        return expected_seconds(found, batch, shares_at(layers, 9, 0.6), compacts=compacts)

    best = min(map(seconds, combinations(range(1, 9), len(chosen))))
    assert seconds(chosen) == pytest.approx(best)


@given(
    layers=st.integers(2, 20),
    check=st.floats(0.0, 20.0),
    total=st.floats(0.01, 1.0),
    batch=st.integers(1, 8),
    compacts=st.booleans(),
)
def test_a_choice_is_always_of_layers_that_exist(
    layers: int, check: float, total: float, batch: int, compacts: bool
) -> None:
    chosen = choose_layers(costs(check=check, layers=layers), batch, total, compacts=compacts)
    assert 1 <= len(chosen) <= MOST_LAYERS
    assert list(chosen) == sorted(set(chosen))
    assert set(chosen) <= set(range(1, layers))


@pytest.mark.parametrize(
    ("found", "batch", "compacts", "words"),
    [
        (costs(check=40.0), 1, True, "too expensive: it costs 40.0 of 12 layers"),
        (costs(rest=100.0), 1, True, "the engine's own work"),
        (costs(row=0.5), 32, False, "running active rows only would pay"),
        (costs(), 32, True, "reading weights is what takes time"),
    ],
)
def test_why_exits_cannot_pay(found: StepCosts, batch: int, compacts: bool, words: str) -> None:
    gain, reason = verdict(found, batch, compacts=compacts)
    assert gain < WORTH
    assert reason is not None
    assert words in reason
