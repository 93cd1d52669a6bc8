"""Exits that the device decides: the oracle's tokens and depths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from exitserve.reference import load_reference

from ..test_criteria import calibrated, requests

EXITS = {"exit_rows": "frequent"}


@pytest.fixture(scope="module")
def model(make_checkpoint):
    return make_checkpoint("llama")


@pytest.fixture(scope="module")
def jobs(random_jobs):
    return random_jobs(count=9, max_tokens=20)


@pytest.mark.parametrize("rows", ["frequent", "all"])
def test_the_engine_is_the_oracle(start, expect, model, jobs, rows: str) -> None:
    reference = load_reference(str(model), exit_rows=rows)
    expected = [expect(reference, one) for one in jobs]
    exits = {"exit_rows": rows}
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
    harness = start(model, exits=EXITS, enable_prefix_caching=False)

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


def test_graphs_that_break_inside_a_branch_are_refused(start, model, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    with pytest.raises(ValueError, match=r"does not support breakable graphs .*drop it"):
        start(model, exits=EXITS, max_model_len=96)


@pytest.mark.nightly
def test_tensor_parallel(start, oracle, expect, model, jobs, monkeypatch) -> None:
    """Each rank keeps its slice of the logits, and all decide alike."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    harness = start(model, exits=EXITS, tensor_parallel_size=2, enable_prefix_caching=False)
    reference = oracle(model)
    assert harness.run(jobs[:5]) == [expect(reference, one) for one in jobs[:5]]


def test_preempted_requests_freeze_where_they_did(
    start, oracle, expect, model, random_jobs, few_blocks
) -> None:
    jobs = random_jobs(count=6, longest=60, max_tokens=60)
    harness = start(model, exits=EXITS, **few_blocks)
    reference = oracle(model)
    assert harness.run(jobs) == [expect(reference, one) for one in jobs]
    assert harness.counter("vllm:num_preemptions") > 0


def test_modes_whose_tokens_wait_need_another_server(start, model, job) -> None:
    from vllm.exceptions import VLLMValidationError

    harness = start(model, exits=EXITS, enable_prefix_caching=False)
    with pytest.raises(VLLMValidationError, match="exit_mode 'defer' needs a server that was st"):
        harness.run([job([5, 6, 7], {"exit_threshold": 0.1, "exit_mode": "defer"})])


def test_calibrated_thresholds_of_another_criterion(
    start, expect, make_checkpoint, tmp_path
) -> None:
    directory = calibrated(make_checkpoint, tmp_path, "entropy")
    asked = [replace(one, max_tokens=20) for one in requests(directory)]
    reference = load_reference(str(directory))
    expected = [expect(reference, one) for one in asked]
    assert {depth for _, depths in expected for depth in depths} == {2, 4, 6}
    harness = start(directory, exits=EXITS, enable_prefix_caching=False)
    assert harness.run(asked) == expected
