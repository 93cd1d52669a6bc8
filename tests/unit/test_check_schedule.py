"""Checks that do not pay are made less often, and nothing else changes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitserve.check_schedule import LONGEST_WAIT, CheckSchedule

RATE = st.floats(0.02, 0.6)


def _checks(schedule: CheckSchedule, would_pass: list[bool], layer: int = 4) -> list[int]:
    """Which tokens are checked."""
    checked = []
    for index, passes in enumerate(would_pass):
        if schedule.is_waiting(layer):
            schedule.skip(layer)
        else:
            checked.append(index)
            schedule.record(layer, passes)
    return checked


@given(RATE)
def test_a_request_that_never_exits_is_hardly_checked(rate: float) -> None:
    checked = _checks(CheckSchedule({4: rate}), [False] * 1000)
    assert len(checked) <= 12 + 1000 / LONGEST_WAIT
    gaps = [after - before for before, after in itertools.pairwise(checked)]
    assert gaps == sorted(gaps), "waits only grow"
    assert max(gaps) == LONGEST_WAIT + 1


@given(RATE)
def test_a_request_that_always_exits_is_always_checked(rate: float) -> None:
    assert _checks(CheckSchedule({4: rate}), [True] * 50) == list(range(50))


@given(RATE, st.lists(st.booleans(), max_size=300))
def test_a_success_ends_the_waiting(rate: float, would_pass: list[bool]) -> None:
    schedule = CheckSchedule({4: rate})
    _checks(schedule, would_pass)
    _checks(schedule, [True] * (LONGEST_WAIT + 1))
    assert not schedule.is_waiting(4)


@given(RATE, st.lists(st.booleans(), max_size=200), st.lists(st.booleans(), max_size=50))
def test_layers_know_nothing_of_each_other(
    rate: float, here: list[bool], elsewhere: list[bool]
) -> None:
    """What lets the oracle decide all tokens of a layer in one pass."""
    crowded = CheckSchedule({4: rate, 8: rate})
    _checks(crowded, elsewhere, layer=8)
    assert _checks(crowded, here) == _checks(CheckSchedule({4: rate, 8: rate}), here)


def test_layers_without_a_rate_are_always_checked() -> None:
    assert _checks(CheckSchedule({}), [False] * 50) == list(range(50))


@pytest.mark.parametrize(("rate", "least"), [(0.1, 0.95), (0.3, 0.85)])
def test_exits_well_above_break_even_are_kept(rate: float, least: float) -> None:
    """One token in two would exit, at random: few of those exits may be lost."""
    import random

    numbers = random.Random(3)
    would_pass = [numbers.random() < 0.5 for _ in range(2000)]
    checked = _checks(CheckSchedule({4: rate}), would_pass)
    found = sum(would_pass[index] for index in checked)
    assert found / sum(would_pass) > least
