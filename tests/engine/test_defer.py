"""Mode "defer" against the oracle: emitted at once, exact keys and values later."""

from __future__ import annotations

import random

import pytest

from exitserve.engine.host.step import Draft
from exitserve.engine.host.timing import PassTiming


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


@pytest.mark.parametrize("modes", [["defer"], ["confidence"], ["defer", "confidence"]])
@pytest.mark.parametrize("leaving", ["never", "now and then", "always"])
def test_rows_that_do_not_leave_get_the_same(
    start, model, jobs, job, expect, expect_notes, oracle, leaving: str, modes, monkeypatch
) -> None:
    """The clock decides whether rows leave; here the test does. Among those that may leave are a
    request at full depth and one that drafts."""
    drawn = random.Random(5)
    ways: list[bool] = []

    def choose(self, requests, tokens, **more) -> bool:
        ways.append(leaving == "always" or (leaving != "never" and drawn.random() < 0.5))
        return ways[-1]

    monkeypatch.setattr(PassTiming, "choose", choose)
    others = ({"exit_threshold": 1.0}, {"exit_threshold": 0.06, "exit_mode": "verify"})
    asked = [
        job(one.prompt, {**one.fields, "exit_mode": modes[index % len(modes)]}, one.max_tokens)
        for index, one in enumerate(filter(is_deferred, jobs))
    ]
    asked += [job(asked[0].prompt[:9], fields, max_tokens=40) for fields in others]
    outcomes = [expect(oracle(model), one) for one in asked]
    verifying = {"mode": "verify", "exit_threshold": 0.06, "num_drafts": 3}
    harness = start(model, exits=verifying, enable_prefix_caching=False)
    assert harness.run(asked) == outcomes
    assert harness.run(asked, every=3) == outcomes
    assert set(ways) == {"never": {False}, "always": {True}}.get(leaving, {False, True})
    counted = harness.stats()
    assert counted["pending_tokens"] == 0
    assert (counted["stepped_aside"] > 50) == (leaving != "always")
    noted = [expect_notes(oracle(model), one) for one in asked[:2]]
    assert harness.notes(asked)[:2] == noted, "of tokens that come several in a step"
    deferring = start(model, enable_prefix_caching=False)
    assert deferring.notes(asked[:-1])[:2] == noted


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


def turns(monkeypatch, through: str) -> None:
    """Lets turns go through all layers, or stop at the last exit: what is faster does not count."""
    how = {
        "always": lambda draft: draft.stands,
        "never": lambda _: False,
        "now and then": lambda draft: draft.stands and draft.position % 3 > 0,
    }
    monkeypatch.setattr(Draft, "goes_through", property(how[through]))


@pytest.mark.parametrize(
    ("drafts", "through"),
    [(1, "always"), (2, "now and then"), (5, "never"), (8, "always"), (8, "now and then")],
)
@pytest.mark.parametrize("checks", ["all", "screened"])
def test_on_a_server_that_drafts(
    start, model, drafting_jobs, expect, oracle, drafts: int, checks: str, through, monkeypatch
) -> None:
    """Several tokens a pass, the same ones; some rows leave, others draft. Screens leave out
    checks unless told otherwise."""
    turns(monkeypatch, through)
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


@pytest.mark.parametrize("mode", ["defer", "confidence", "verify"])
@pytest.mark.parametrize("through", ["always", "never"])
def test_all_rows_draft_on(
    start, model, jobs, job, expect, oracle, mode: str, through: str, monkeypatch
) -> None:
    """Through all layers where no exit passes, so each step has four turns, and one token more; but
    for a request's first token, which is sent before any is drafted, and the next. Turns that stop
    there, as of drafts that are to be judged, are fewer with several rows: none is made for few."""
    monkeypatch.setattr(PassTiming, "choose", lambda *_, **__: True)
    turns(monkeypatch, through)
    fields = {"exit_threshold": 0.08, "exit_mode": mode}
    asked = [job(one.prompt, fields, 2 + 5 * 8) for one in jobs if is_deferred(one)]
    said = [job(one.prompt, {} if mode == "verify" else fields, one.max_tokens) for one in asked]
    exits = {"mode": mode, "exit_threshold": 0.08, "num_drafts": 4}
    harness = start(model, exits=exits, enable_prefix_caching=False, disable_log_stats=False)
    expected = [expect(oracle(model), one) for one in said]
    assert [harness.run([one])[0] for one in asked] == expected
    alone = harness.counter("vllm:spec_decode_num_draft_tokens")
    assert harness.run(asked) == expected
    together = harness.counter("vllm:spec_decode_num_draft_tokens") - alone
    if mode == "verify" or through == "never":
        assert 20 < together < alone
    else:
        assert together == alone == len(asked) * 8 * 4
    assert harness.run(asked, every=3) == expected


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
@pytest.mark.parametrize("through", ["always", "now and then"])
def test_drafting_where_room_is_scarce(
    start,
    model,
    job,
    expect,
    oracle,
    few_blocks,
    mode: str,
    scarce: str,
    through: str,
    monkeypatch,
) -> None:
    """Requests are preempted, or wait for a pass that has room for their drafts, while tokens from
    before these wait too: turns end where few requests take part, so some are asked in a pass."""
    monkeypatch.setattr(PassTiming, "choose", lambda *_, **__: True)
    turns(monkeypatch, through)
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


def test_preempted_requests(start, model, jobs, expected, expect_notes, oracle, few_blocks) -> None:
    """What waits is computed anew, or before a pass that cannot take it along."""
    harness = start(model, max_num_batched_tokens=32, **few_blocks)
    assert harness.run(jobs) == expected
    assert harness.run(jobs, every=2) == expected
    assert harness.counter("vllm:num_preemptions") > 0
    some, before = jobs[:2], harness.counter("vllm:num_preemptions")
    assert harness.notes(jobs)[:2] == [expect_notes(oracle(model), one) for one in some]
    assert harness.counter("vllm:num_preemptions") > before


def test_nothing_waits_once_all_have_ended(start, model, jobs, few_blocks, monkeypatch) -> None:
    """Not of requests either that were aborted while they were preempted."""
    monkeypatch.setattr(PassTiming, "choose", lambda *_, **__: True)  # else none may have left
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
