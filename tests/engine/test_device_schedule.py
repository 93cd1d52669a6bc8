"""Which checks the device makes: the host's numbers."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from exitserve.check_schedule import CheckSchedule
from exitserve.engine.device.rows import DeviceSchedule

SLOTS = 4
RATES = st.one_of(st.none(), st.floats(0.01, 0.99))
STEP = st.tuples(
    st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS),
    st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS),
    st.one_of(st.none(), st.integers(0, SLOTS - 1)),
)


@given(
    st.lists(RATES, min_size=1, max_size=2),
    st.lists(STEP, max_size=60),
    st.permutations(range(SLOTS)),
)
def test_checks_are_left_out_as_on_the_host(rates, steps, order) -> None:
    layers = range(len(rates))
    known = {layer: rate for layer, rate in zip(layers, rates, strict=True) if rate is not None}
    host = [CheckSchedule(known) for _ in range(SLOTS)]
    state = torch.zeros(SLOTS + 1, 3, len(rates), dtype=torch.float64)
    device = DeviceSchedule(rates, state)
    state[:] = first = torch.tensor(device.first())
    rows = torch.tensor([*order, SLOTS, SLOTS])  # and padding, which is nobody's
    for arrived, passes, begins in steps:
        if begins is not None:
            host[begins] = CheckSchedule(known)
            state[begins] = first
        for layer in layers:
            here = torch.tensor([*arrived, False, False])
            due = device.take_due(layer, rows, here)
            expected = [
                come and not host[slot].is_waiting(layer)
                for come, slot in zip(arrived, order, strict=True)
            ]
            for come, slot in zip(arrived, order, strict=True):
                if come and host[slot].is_waiting(layer):
                    host[slot].skip(layer)
            assert due.tolist() == [*expected, False, False]
            passed = due & torch.tensor([*passes, True, True])
            device.record(layer, rows, due, passed)
            for checked, went, slot in zip(expected, passes, order, strict=True):
                if checked:
                    host[slot].record(layer, went)
