"""Mode "defer" against the oracle: emitted at once, exact keys and values later."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def model(make_checkpoint):
    return make_checkpoint("llama")


@pytest.fixture(scope="module")
def jobs(random_jobs, job):
    """Deferring requests, and in their midst others of every kind."""
    made = random_jobs(count=10, max_tokens=60)
    thresholds = (0.06, 0.08, 0.1, 0.12, 0.15)
    return [
        one if index % 3 == 2 else job(one.prompt, deferred(thresholds[index % 5]), one.max_tokens)
        for index, one in enumerate(made)
    ]


def deferred(threshold: float) -> dict[str, object]:
    return {"exit_threshold": threshold, "exit_mode": "defer"}


@pytest.fixture(scope="module")
def expected(model, jobs, expect, oracle):
    reference = oracle(model)
    outcomes = [expect(reference, one) for one in jobs]
    early = [depths for one, (_, depths) in zip(jobs, outcomes, strict=True) if is_deferred(one)]
    assert sum({2, 4, 6} <= set(depths[1:]) for depths in early) > 3
    assert longest_run(early) > 16, "nobody has to run because too many wait"
    return outcomes


def is_deferred(one) -> bool:
    return one.fields.get("exit_mode") == "defer"


def longest_run(depths: list[list[int]]) -> int:
    """The most consecutive tokens that left early."""
    return max(
        len(run)
        for row in depths
        for run in "".join("." if depth < 6 else " " for depth in row).split()
    )


@pytest.mark.parametrize("path", ["host", "masked"])
def test_engine_is_the_oracle(start, model, jobs, expected, path: str) -> None:
    harness = start(model, exits={"exit_path": path}, enable_prefix_caching=False)
    assert harness.run(jobs) == expected
    assert harness.run(jobs, every=3) == expected
    if path == "host":
        assert [harness.run([one]) for one in jobs[:2]] == [[one] for one in expected[:2]]
        counted = harness.stats()
        assert counted["deferred_layers"] > 0


DRAFTING = {"mode": "defer", "exit_threshold": 0.08}


@pytest.fixture(params=["defer", "confidence"])
def drafting_jobs(request, jobs, job):
    """Those that defer in either mode whose tokens are decided by exits, and the others."""
    return [
        job(one.prompt, {**one.fields, "exit_mode": request.param}, one.max_tokens)
        if is_deferred(one)
        else one
        for one in jobs
    ]


@pytest.mark.parametrize("drafts", [1, 2, 8])
@pytest.mark.parametrize("checks", ["all", "screened"])
def test_on_a_server_that_drafts(
    start, model, drafting_jobs, expect, oracle, drafts: int, checks: str
) -> None:
    """Several tokens a pass, the same ones; some rows leave, others draft. Screens leave out
    checks unless told otherwise."""
    reference, jobs = oracle(model), drafting_jobs
    if checks == "all":
        reference.screens = {}
    exits = {**DRAFTING, "num_drafts": drafts, "exit_checks": checks}
    harness = start(model, exits=exits, enable_prefix_caching=False, disable_log_stats=False)
    expected = [expect(reference, one) for one in jobs]
    assert harness.run(jobs) == expected
    assert harness.run(jobs, every=3) == expected
    assert [harness.run([one]) for one in jobs[:2]] == [[one] for one in expected[:2]]
    if drafts > 1 and checks == "all":
        drafted = harness.counter("vllm:spec_decode_num_draft_tokens")
        assert drafted == harness.counter("vllm:spec_decode_num_accepted_tokens") > 50


def test_preempted_while_drafting(start, model, drafting_jobs, expect, oracle, few_blocks) -> None:
    reference, jobs = oracle(model), drafting_jobs
    reference.screens = {}
    expected = [expect(reference, one) for one in jobs]
    exits = {**DRAFTING, "num_drafts": 4, "exit_checks": "all"}
    harness = start(model, exits=exits, max_num_batched_tokens=128, **few_blocks)
    assert harness.run(jobs) == expected
    assert harness.run(jobs, every=2) == expected
    assert harness.counter("vllm:num_preemptions") > 0


@pytest.mark.parametrize("mode", ["defer", "confidence", "verify"])
@pytest.mark.parametrize("scarce", ["blocks", "tokens"])
def test_drafting_where_room_is_scarce(
    start,
    model,
    job,
    expect,
    oracle,
    few_blocks,
    mode: str,
    scarce: str,
) -> None:
    """Requests are preempted, or wait for a pass that has room for their drafts, while tokens from
    before these wait too: turns end where few requests take part, so some are asked in a pass."""
    room = {
        "blocks": few_blocks | {"max_num_batched_tokens": 128},
        "tokens": {"max_num_batched_tokens": 16, "max_model_len": 128, "max_num_seqs": 10},
    }
    verifying = {"mode": "verify", "exit_threshold": 0.06, "num_drafts": 3}
    harness = start(model, exits=verifying, **{"enable_prefix_caching": False, **room[scarce]})
    fields = {"exit_threshold": 0.06, "exit_mode": mode}
    asked = [job([5, 9, 4, one % 20 + 2], fields, 90) for one in range(24)]
    reference = oracle(model)
    said = [job(one.prompt, {} if mode == "verify" else fields, 90) for one in asked]
    assert harness.run(asked, every=2) == [expect(reference, one) for one in said]


def test_preempted_requests(start, model, jobs, expected, few_blocks) -> None:
    """What waits is computed anew, or before a pass that cannot take it along."""
    harness = start(model, max_num_batched_tokens=32, **few_blocks)
    assert harness.run(jobs) == expected
    assert harness.run(jobs, every=2) == expected
    assert harness.counter("vllm:num_preemptions") > 0


def test_nothing_waits_once_all_have_ended(start, model, jobs, few_blocks) -> None:
    """Not of requests either that were aborted while they were preempted."""
    harness = start(model, max_num_batched_tokens=32, **few_blocks)
    core = harness.engine.llm_engine
    left = 0
    for steps in range(20, 120, 20):
        for number, one in enumerate(jobs):
            harness._add(f"aborted-{steps}-{number}", one)
        for _ in range(steps):
            core.step()
        left += harness.stats()["pending_tokens"]
        unfinished = [f"aborted-{steps}-{number}" for number in range(len(jobs))]
        core.abort_request(unfinished)
        while (
            core.has_unfinished_requests() or core.engine_core.engine_core.scheduler.has_requests()
        ):
            core.step()
        assert harness.stats()["pending_tokens"] == 0
    assert left > 0 and harness.counter("vllm:num_preemptions") > 0, "the test shows nothing"


@pytest.mark.parametrize(
    "drafts", [{}, {**DRAFTING, "num_drafts": 4}, {**DRAFTING, "num_drafts": 9}]
)
def test_the_prefix_cache_holds_what_full_depth_would(
    start, model, job, random_jobs, drafts: dict[str, object]
) -> None:
    """Blocks are complete when they enter the cache, so anyone may read them."""
    exits = {"exit_checks": "all", **drafts}
    harness = start(model, exits=exits, block_size=32, disable_log_stats=False)
    prompt = random_jobs()[0].prompt
    # The request ends just as it fills a block, when tokens would otherwise be left waiting.
    early = job(prompt, deferred(0.06), max_tokens=4 * 32 - len(prompt) + 1)
    ((said, depths),) = harness.run([early])
    assert set(depths[-6:]) == {2}
    follow_ups = [
        job(early.prompt + said, fields, max_tokens=24)
        for fields in ({"exit_threshold": 1.0}, deferred(0.1), deferred(0.06))
    ]
    hits = harness.counter("vllm:prefix_cache_hits")
    cached, read = harness.run(follow_ups), harness.logprobs(early.prompt + said)
    assert harness.counter("vllm:prefix_cache_hits") >= hits + 3 * 128
    harness.engine.reset_prefix_cache()
    assert [harness.run([one])[0] for one in follow_ups] == cached
    # Keys and values, seen through what attends to them: float32 sums in another order.
    harness.engine.reset_prefix_cache()
    for mine, theirs in zip(read, harness.logprobs(early.prompt + said), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
