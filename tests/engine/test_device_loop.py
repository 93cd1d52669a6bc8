"""Exits that the device decides, as on a GPU: the host's numbers, and the oracle's tokens."""

from __future__ import annotations

from typing import Any

import pytest
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


@pytest.fixture(scope="module")
def model(make_checkpoint):
    return make_checkpoint("llama")


@pytest.fixture(scope="module")
def jobs(random_jobs):
    """Modes "defer" and "verify" are not served so."""
    found = random_jobs(count=12, max_tokens=60)
    return [one for one in found if one.fields.get("exit_mode") != "defer"]


@pytest.mark.parametrize("checks", ["paying", "all"])
def test_the_engine_is_the_oracle(start, expect, model, jobs, checks: str) -> None:
    from exitserve.reference import load_reference

    reference = load_reference(str(model), exit_checks=checks)
    expected = [expect(reference, one) for one in jobs]
    exits = {"exit_path": "resident", "exit_checks": checks}
    harness = start(model, exits=exits, enable_prefix_caching=False)
    assert harness.run(jobs) == expected
    assert harness.run(jobs, every=3) == expected
    assert harness.run(jobs[:1]) == expected[:1]
    counted = harness.stats()
    depths = [depth for _, found in (*expected, *expected, *expected[:1]) for depth in found]
    assert counted["tokens_by_depth"] == {
        depth: depths.count(depth) for depth in counted["tokens_by_depth"]
    }
    assert 0 < sum(counted["passed"].values()) <= sum(counted["checks"].values())


READS = ("layer_reads", "checks", "head_passes", "final_heads", "frozen_tokens")


def test_a_request_alone_reads_what_its_depths_say(start, model, jobs) -> None:
    harness = start(model, exits={"exit_path": "resident"}, enable_prefix_caching=False)

    def counts() -> dict[str, Any]:
        found: dict[str, Any] = harness.stats()
        return {**found, "checks": sum(found["checks"].values())}

    after = counts()
    full, seen = after["num_layers"], set[int]()
    assert after["layer_reads"] == after["head_passes"] == after["final_heads"] == 0
    for one in jobs[:7]:
        before = after
        ((_, depths),) = harness.run([one])
        after = counts()
        reads = {name: after[name] - before[name] for name in after if name in READS}
        seen |= set(depths)
        exits = sum(depth < full for depth in depths)
        assert reads["checks"] == reads["head_passes"] >= exits
        assert reads["layer_reads"] == sum(depths)
        assert reads["final_heads"] == len(depths) - exits
        assert reads["frozen_tokens"] == exits
    assert len(seen) > 2


def test_compiled_segments(start, oracle, expect, model, jobs) -> None:
    """Selects between layers are compiled with them."""
    exits = {"exit_path": "resident"}
    harness = start(model, exits=exits, enforce_eager=False, enable_prefix_caching=False)
    reference = oracle(model)
    assert harness.run(jobs) == [expect(reference, one) for one in jobs]


def test_tensor_parallel(start, oracle, expect, model, jobs, monkeypatch) -> None:
    """Each rank keeps its slice of the logits, and all decide alike."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    exits = {"exit_path": "resident"}
    harness = start(model, exits=exits, tensor_parallel_size=2, enable_prefix_caching=False)
    reference = oracle(model)
    assert harness.run(jobs) == [expect(reference, one) for one in jobs]


def test_preempted_requests_freeze_where_they_did(
    start, oracle, expect, model, random_jobs, few_blocks
) -> None:
    jobs = [
        one
        for one in random_jobs(count=14, longest=60, max_tokens=60)
        if one.fields.get("exit_mode") != "defer"
    ]
    harness = start(model, exits={"exit_path": "resident"}, **few_blocks)
    reference = oracle(model)
    assert harness.run(jobs) == [expect(reference, one) for one in jobs]
    assert harness.counter("vllm:num_preemptions") > 0


def test_modes_whose_tokens_wait_are_refused(start, model, job) -> None:
    from vllm.exceptions import VLLMValidationError

    from exitserve.errors import ExitServeError

    with pytest.raises(ExitServeError, match="mode 'verify' is not served on GPUs yet"):
        start(model, exits={"exit_path": "resident", "mode": "verify", "exit_threshold": 0.5})
    harness = start(model, exits={"exit_path": "resident"}, enable_prefix_caching=False)
    with pytest.raises(VLLMValidationError, match="mode 'defer' is not served on GPUs yet"):
        harness.run([job([5, 6, 7], {"exit_threshold": 0.1, "exit_mode": "defer"})])
