"""Several tokens a step, turn by turn: by hand, and what must hold always."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitserve.step_costs.curves import Curve, StepCosts
from exitserve.step_costs.turns import REGROUPING_SECONDS, TURN_SECONDS, turns_speedup


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


@pytest.mark.parametrize("freezes", [False, True])
def test_one_row_that_always_exits(freezes: bool) -> None:
    """Four turns of two layers and a check, then the six other layers, the head and the rest."""
    full = 8 + 0.5 + 1
    step = 4 * (2 + 0.5 + TURN_SECONDS[0]) + 6 + 0.5 + 1
    assert turns_speedup(costs(), 1, {2: 1.0}, 4, freezes=freezes) == pytest.approx(5 * full / step)


def test_one_row_goes_on_to_its_second_exit() -> None:
    """Half of the tokens exit at layer 2, the others at layer 4."""
    full, turn = 8 + 0.5 + 1, 2 + 0.5 + 0.5 * (2 + 0.5) + TURN_SECONDS[0]
    step = 3 * turn + 6 + 0.5 + 1
    found = turns_speedup(costs(), 1, {2: 0.5, 4: 0.5}, 3, freezes=True)
    assert found == pytest.approx(4 * full / step)


def test_turns_end_where_fewer_than_half_go_on() -> None:
    """Two rows of which each exits with probability 1/2: another turn follows unless both stay."""
    full = 8 + 0.5 + 1
    turns = [2.5 + TURN_SECONDS[0] + TURN_SECONDS[1], 2.5 + TURN_SECONDS[0]]  # of two rows, of one
    seconds = turns[0] + 0.25 * turns[0] + 0.5 * turns[1] + 6 + 0.5 + 1 + REGROUPING_SECONDS
    tokens = 1 + 0.5 + 0.25 * 0.5 + 0.5 * 0.5 / 2
    found = turns_speedup(costs(), 2, {2: 0.5}, 2, freezes=False)
    assert found == pytest.approx(tokens * full / seconds)


def test_several_rows_go_on_to_their_second_exit() -> None:
    """If they are half of the batch or more: of two rows, unless both exit at the first."""
    full = 8 + 0.5 + 1
    first, second = 2.5 + TURN_SECONDS[0] + TURN_SECONDS[1], 2 + 0.5
    seconds = first + 0.75 * second + 6 + 0.5 + 1 + REGROUPING_SECONDS
    found = turns_speedup(costs(), 2, {2: 0.5, 4: 0.5}, 1, freezes=False)
    assert found == pytest.approx(2 * full / seconds)
    four = turns_speedup(costs(), 4, {2: 0.75, 4: 0.25}, 1, freezes=False)
    few = 0.75**4 + 4 * 0.75**3 * 0.25  # that fewer than two stay: those end the turn, and wait
    seconds += 2 * TURN_SECONDS[1] - (few - 0.25) * second
    tokens = 2 - 4 * 0.75**3 * 0.25 / 4
    assert four == pytest.approx(tokens * full / seconds)


def test_what_is_frozen_costs_no_more_arithmetic() -> None:
    """The pass behind the turns has a token of each row, not all that exited."""
    dear = replace(costs(), matrices=Curve(((1, 1.0), (2, 2.0), (16, 16.0))))
    frozen, kept = (turns_speedup(dear, 1, {2: 0.9}, 4, freezes=one) for one in (True, False))
    assert frozen > 1.5 * kept


@given(
    st.integers(1, 40),
    st.dictionaries(st.sampled_from((2, 4, 6)), st.floats(0.0, 0.33), min_size=1),
    st.integers(1, 8),
    st.booleans(),
)
def test_bounds(batch: int, shares: dict[int, float], drafts: int, freezes: bool) -> None:
    """At most as many tokens as may be drafted; what exits add makes it slower."""
    found = turns_speedup(costs(), batch, shares, drafts, freezes=freezes)
    assert 0.0 < found <= (1 + drafts) * 9.5 / (6 - min(shares) + 2)
    assert turns_speedup(costs(1.0), batch, shares, drafts, freezes=freezes) < found
    nothing = dict.fromkeys(shares, 0.0)
    assert turns_speedup(costs(), batch, nothing, drafts, freezes=freezes) < 1.0
