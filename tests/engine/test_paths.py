"""Each optimisation beside the plain way: same tokens, same depths, and the oracle's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from exitserve.reference import load_reference


@pytest.fixture(scope="module")
def model(make_checkpoint):
    return make_checkpoint("llama")


@pytest.fixture(scope="module")
def jobs(random_jobs):
    return random_jobs(max_tokens=60)


@pytest.fixture(scope="module")
def expected(model, jobs, expect):
    return {
        rows: [expect(load_reference(str(model), exit_rows=rows), one) for one in jobs]
        for rows in ("frequent", "all")
    }


def _depths(outcomes) -> list[int]:
    return [depth for _, depths in outcomes for depth in depths]


def test_rows_change_what_exits(expected) -> None:
    """Else the comparisons below would show nothing of them."""
    assert expected["frequent"] != expected["all"]


@pytest.mark.parametrize("way", ["rows that leave", "masked"])
@pytest.mark.parametrize("rows", ["frequent", "all"])
def test_engine_is_the_oracle(start, model, jobs, expected, rows: str, way: str, request) -> None:
    if way == "masked":
        request.getfixturevalue(way)
    harness = start(model, exits={"exit_rows": rows}, enable_prefix_caching=False)
    assert harness.run(jobs) == expected[rows]
    assert harness.run(jobs, every=3) == expected[rows]
    assert sum(harness.stats()["checks"].values()) > 0


WHOLE_HEAD: list[dict[str, Any]] = [{"temperature": 1e-3}, {"logprobs": 2}, {}]
"""What makes a request read the whole head where its token exits, and what does not."""


def asking_more(jobs) -> list[Any]:
    return [
        replace(one, sampling=WHOLE_HEAD[index % 3], max_tokens=16)
        for index, one in enumerate(jobs)
    ]


def test_the_whole_head_is_read_for_those_that_need_it(start, model, jobs, expect, request) -> None:
    """Beside others in the same passes, with rows that leave and with rows that stay."""
    asked, reference = asking_more(jobs), load_reference(str(model))
    own = [expect(reference, one) for one in asked]
    assert own != [expect(reference, replace(one, sampling={})) for one in asked]
    harness = start(model, enable_prefix_caching=False)
    assert harness.run(asked) == own
    request.getfixturevalue("masked")
    assert harness.run(asked, every=3) == own


def test_preempted_requests_freeze_where_they_did(
    start, model, random_jobs, expect, few_blocks
) -> None:
    jobs, reference = random_jobs(count=10, max_tokens=60), load_reference(str(model))
    harness = start(model, max_num_batched_tokens=32, **few_blocks)
    expected = [expect(reference, one) for one in jobs]
    assert harness.run(jobs) == expected
    assert harness.run(jobs, every=2) == expected
    assert harness.counter("vllm:num_preemptions") > 0


def test_compiled_segments(start, make_checkpoint, random_jobs, expect, job) -> None:
    """Of one layer each, which a compiler is done with soonest."""
    model = make_checkpoint("llama", exits=(1, 2), num_hidden_layers=3)
    fields: list[dict[str, Any]] = [{"exit_threshold": 0.1}, {"exit_threshold": 0.3}, {}]
    fields.append({"exit_layer": 1})
    jobs = [
        job(one.prompt, fields[index % 4], 30) for index, one in enumerate(random_jobs(count=8))
    ]
    expected = [expect(load_reference(str(model)), one) for one in jobs]
    assert set(_depths(expected)) == {1, 2, 3}
    harness = start(model, enforce_eager=False, enable_prefix_caching=False)
    assert harness.run(jobs) == expected


def test_tensor_parallel(start, model, jobs, expected, monkeypatch) -> None:
    """Every rank takes the same branch, and the cache of each holds its own heads."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    harness = start(model, tensor_parallel_size=2, enable_prefix_caching=False)
    assert harness.run(jobs, every=2) == expected["frequent"]


@pytest.mark.nightly
def test_tensor_parallel_without_a_head_of_its_own(
    start, expect, oracle, random_jobs, make_checkpoint, monkeypatch
) -> None:
    """vLLM's Gemma 2 keeps no head beside its embeddings."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    shape = {"head_dim": 32, "sliding_window": 32, "query_pre_attn_scalar": 32}
    tied, jobs = make_checkpoint("gemma2", **shape), random_jobs(max_tokens=30)
    harness = start(tied, tensor_parallel_size=2, enable_prefix_caching=False)
    reference = oracle(tied)
    assert harness.run(jobs) == [expect(reference, one) for one in jobs]


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_rounded_weights_and_caches(start, model, jobs, cache: str) -> None:
    """Rounding differs with the batch, so tokens may; the machinery must still add up."""
    rounding = {"dtype": "bfloat16", "kv_cache_dtype": cache}
    harness = start(model, **rounding, enable_prefix_caching=False)
    outcomes = harness.run(jobs)
    assert {2, 4, 6} == set(_depths(outcomes))
    fixed = [
        set(depths[1:])
        for one, (_, depths) in zip(jobs, outcomes, strict=True)
        if "exit_layer" in one.fields
    ]
    assert fixed == [{one.fields["exit_layer"]} for one in jobs if "exit_layer" in one.fields]
