"""The guarantee, simulated: it is wrong as rarely as it says, and a looser one is caught."""

import math
import random
from collections.abc import Callable, Sequence

import pytest

from exitserve.calibration.bounds import min_pieces, p_value

DELTA, LIMIT, PIECES, RUNS = 0.1, 0.05, 150, 600


def losses_of(mean: float, kind: str, draw: random.Random, count: int = PIECES) -> list[float]:
    """Independent losses in [0, 1]: rare disasters, small errors everywhere, or both."""
    if kind == "rare":
        return [float(draw.random() < mean) for _ in range(count)]
    if kind == "even":
        return [draw.betavariate(20 * mean, 20 * (1 - mean)) for _ in range(count)]
    return [draw.betavariate(mean / 2, (1 - mean) / 2) for _ in range(count)]


def wrong_share(kind: str, keeps: Callable[[Sequence[float]], bool]) -> float:
    """How often a risk that is hardly above the limit passes for one below."""
    draw = random.Random(f"{kind}-0")
    return sum(keeps(losses_of(1.01 * LIMIT, kind, draw)) for _ in range(RUNS)) / RUNS


SPREAD = 3 * math.sqrt(DELTA * (1 - DELTA) / RUNS)
"""Three standard deviations of a share of `DELTA` in so many runs."""


@pytest.mark.parametrize("kind", ["rare", "even", "both"])
def test_a_target_is_missed_no_more_often_than_the_level_allows(kind: str) -> None:
    assert wrong_share(kind, lambda seen: p_value(seen, LIMIT, DELTA) <= DELTA) <= DELTA + SPREAD


@pytest.mark.parametrize("kind", ["rare", "even", "both"])
def test_a_loosened_bound_would_be_caught(kind: str) -> None:
    """Without a bound, by the mean alone, the same simulation fails: it can tell."""
    assert wrong_share(kind, lambda seen: sum(seen) / len(seen) <= LIMIT) > DELTA + SPREAD


@pytest.mark.parametrize("limit", [0.01, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("delta", [0.05, 0.2])
def test_the_least_text_is_told(limit: float, delta: float) -> None:
    """No test in [0, 1] can do with less than log(1 / delta) / -log(1 - limit) perfect pieces."""
    least = min_pieces(limit, delta)
    floor = math.log(1 / delta) / -math.log(1 - limit)
    assert floor <= least <= 1.5 * floor + 10
    assert p_value([0.0] * least, limit, delta) <= delta
    assert p_value([0.0] * (math.floor(floor) - 1), limit, delta) > delta


@pytest.mark.parametrize("loss", [-0.01, 1.01, math.nan])
def test_losses_outside_of_the_theorem_are_refused(loss: float) -> None:
    with pytest.raises(AssertionError, match="the theorem"):
        p_value([loss], 0.1, 0.05)
