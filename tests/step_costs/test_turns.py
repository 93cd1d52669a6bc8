"""Several tokens a step, turn by turn: by hand, and what must hold always."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitserve.step_costs.curves import Curve, StepCosts
from exitserve.step_costs.turns import (
    REGROUPING_SECONDS,
    STEPS_WAITED,
    TURN_SECONDS,
    turns_speedup,
)


def flat(seconds: float) -> Curve:
    return Curve(((1, seconds), (16, seconds)))


def costs(overhead: float = 0.0, layer: float = 1.0) -> StepCosts:
    """Parts that cost the same for any number of rows, in seconds."""
    return StepCosts(
        num_layers=8,
        matrices=flat(layer),
        attention=flat(0.0),
        fill=flat(0.0),
        check=flat(0.5),
        head=flat(0.5),
        rest=flat(1.0),
        exits=flat(overhead),
    )


FULL = 8 + 0.5 + 1
DECIDING = ("defer", "confidence")
WAYS = [*((mode, True) for mode in DECIDING), *((mode, False) for mode in (*DECIDING, "verify"))]


@pytest.mark.parametrize(("mode", "through"), WAYS)
def test_one_row_that_always_exits(mode, through: bool) -> None:
    """Four turns of two layers and a check; then a pass that does the same, or runs the six other
    layers and the head for all."""
    turn = 2 + 0.5
    last = turn if through else 6 + 0.5
    step = 4 * (turn + TURN_SECONDS[0]) + last + 1
    assert turns_speedup(costs(), 1, {2: 1.0}, 4, mode, through=through) == pytest.approx(
        5 * FULL / step
    )


def test_one_row_goes_on_to_its_second_exit() -> None:
    """Half of the tokens exit at layer 2, the others at layer 4."""
    turn = 2 + 0.5 + 0.5 * (2 + 0.5)
    for mode, through in WAYS:
        last = turn if through else 6 + 0.5
        step = 3 * (turn + TURN_SECONDS[0]) + last + 1
        found = turns_speedup(costs(), 1, {2: 0.5, 4: 0.5}, 3, mode, through=through)
        assert found == pytest.approx(4 * FULL / step)


@pytest.mark.parametrize("mode", DECIDING)
def test_who_does_not_exit_runs_all_layers(mode) -> None:
    """Of two rows, unless both exit; each of three times."""
    run = 2 + 0.5 + 0.75 * (6 + 0.5)
    step = 3 * run + 2 * sum(TURN_SECONDS) + 1
    found = turns_speedup(costs(), 2, {2: 0.5}, 2, mode, through=True)
    assert found == pytest.approx(3 * FULL / step)
    assert turns_speedup(costs(), 2, {2: 0.0}, 2, mode, through=True) == pytest.approx(
        3 * FULL / (3 * (2 + 0.5 + 6 + 0.5) + 2 * sum(TURN_SECONDS) + 1)
    )


def test_turns_that_stop_end_where_fewer_than_half_go_on() -> None:
    """Two rows of which each exits with probability 1/2: another turn follows unless both stay."""
    turns = [2.5 + sum(TURN_SECONDS), 2.5 + TURN_SECONDS[0]]  # of two rows, of one
    seconds = turns[0] + 0.25 * turns[0] + 0.5 * turns[1] + 6 + 0.5 + 1 + REGROUPING_SECONDS
    tokens = 1 + 0.5 + 0.25 * 0.5 + 0.5 * 0.5 / 2
    found = turns_speedup(costs(), 2, {2: 0.5}, 2, "verify", through=False)
    assert found == pytest.approx(tokens * FULL / seconds)


def test_turns_that_stop_go_on_to_the_second_exit() -> None:
    """If half of the batch or more does: of two rows, unless both exit at the first."""
    first, second = 2.5 + sum(TURN_SECONDS), 2 + 0.5
    seconds = first + 0.75 * second + 6 + 0.5 + 1 + REGROUPING_SECONDS
    found = turns_speedup(costs(), 2, {2: 0.5, 4: 0.5}, 1, "defer", through=False)
    assert found == pytest.approx(2 * FULL / seconds)
    four = turns_speedup(costs(), 4, {2: 0.75, 4: 0.25}, 1, "defer", through=False)
    few = 0.75**4 + 4 * 0.75**3 * 0.25  # that fewer than two stay: those end the turn, and wait
    seconds += 2 * TURN_SECONDS[1] - (few - 0.25) * second
    tokens = 2 - 4 * 0.75**3 * 0.25 / 4
    assert four == pytest.approx(tokens * FULL / seconds)


@pytest.mark.parametrize("through", [True, False])
def test_short_answers_wait_for_the_steps_of_others(through: bool) -> None:
    def gain(batch: int, answer: float) -> float:
        return turns_speedup(costs(), batch, {2: 1.0}, 4, "defer", through=through, answer=answer)

    lost = 1.0 + STEPS_WAITED * 5 / 50  # all exit, so a step has five tokens
    assert gain(2, 50) == pytest.approx(gain(2, math.inf) / lost)
    assert gain(1, 50) == gain(1, math.inf)


@pytest.mark.parametrize("through", [True, False])
def test_what_is_frozen_costs_no_more_arithmetic(through: bool) -> None:
    """Of those that wait, a token that goes on takes all along."""
    dear = replace(costs(), matrices=Curve(((1, 1.0), (2, 2.0), (16, 16.0))))

    def gain(made: StepCosts, mode) -> float:
        return turns_speedup(made, 1, {2: 0.75}, 4, mode, through=through)

    assert gain(dear, "confidence") > 1.2 * gain(dear, "defer")
    assert gain(replace(dear, fill=flat(0.5)), "confidence") < gain(dear, "confidence")


@given(
    st.integers(1, 40),
    st.dictionaries(st.sampled_from((2, 4, 6)), st.floats(0.0, 0.33), min_size=1),
    st.integers(1, 8),
    st.sampled_from(WAYS),
)
def test_bounds(batch: int, shares: dict[int, float], drafts: int, way) -> None:
    """No token takes less than the layers to the first exit, and its check; what exits add makes
    it slower."""

    def gain(made: StepCosts, shares: dict[int, float]) -> float:
        return turns_speedup(made, batch, shares, drafts, way[0], through=way[1])

    found, nothing = gain(costs(), shares), dict.fromkeys(shares, 0.0)
    assert 0.0 < found <= (1 + drafts) * FULL / (drafts * (min(shares) + 0.5) + 1)
    assert gain(costs(1.0), shares) < found
    if way[1]:  # a step of vLLM has several tokens
        assert gain(costs(), nothing) > FULL / (FULL + 0.5 * len(shares) + TURN_SECONDS[1] * 40)
    else:
        assert gain(costs(), nothing) < 1.0
