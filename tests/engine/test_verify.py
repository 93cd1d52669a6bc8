"""Mode "verify" against the oracle and full depth: several tokens a pass, and nothing lost."""

from __future__ import annotations

import pytest

from exitserve.policy import ExitPolicy

from .token_pairs import LEVEL, PROMPT, expected_pairs, p_value, sampled_pairs

ALWAYS = {"mode": "verify", "exit_threshold": 0.08, "exit_checks": "all"}
"""Drafts wherever the oracle does: a server that finds drafting slow would step aside."""
COUNTED = ("draft", "accepted")
"""In names of vLLM's metrics."""


@pytest.fixture(scope="module")
def model(make_checkpoint):
    return make_checkpoint("llama")


@pytest.fixture(scope="module")
def jobs(random_jobs, job):
    """Drafting requests, and in their midst others of every kind."""
    made = random_jobs(count=10, max_tokens=60)
    thresholds = (0.06, 0.08, 0.1, 0.12, 0.15)
    return [
        one if index % 3 == 2 else job(one.prompt, verified(thresholds[index % 5]), one.max_tokens)
        for index, one in enumerate(made)
    ]


def verified(threshold: float) -> dict[str, object]:
    return {"exit_threshold": threshold, "exit_mode": "verify"}


@pytest.fixture(scope="module")
def reference(model, oracle):
    found = oracle(model)
    found.screens = {}  # as "exit_checks": "all" in the engine
    return found


@pytest.fixture(scope="module")
def expected(reference, jobs, expect):
    return [expect(reference, one) for one in jobs]


@pytest.fixture(scope="module")
def drafts(reference, jobs):
    """How many tokens the oracle drafts for all jobs together, and how many it accepts."""
    found = [
        reference.decode(one.prompt, one.max_tokens, one.policy, ignore_eos=True)
        for one in jobs
        if is_verified(one)
    ]
    counts = sum(one.drafted for one in found), sum(one.accepted for one in found)
    assert 20 < counts[1] < counts[0], "nothing is accepted, or nothing rejected"
    return counts


def is_verified(one) -> bool:
    return one.fields.get("exit_mode") == "verify"


def test_the_oracle_is_full_depth(reference, jobs, expected, expect, job) -> None:
    for one, outcome in zip(jobs, expected, strict=True):
        if is_verified(one):
            assert outcome == expect(reference, job(one.prompt, {}, one.max_tokens))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_engine_is_the_oracle(start, model, jobs, expected, drafts, compiled: bool) -> None:
    harness = start(
        model,
        exits=ALWAYS,
        enable_prefix_caching=False,
        enforce_eager=not compiled,
        disable_log_stats=False,
    )
    assert harness.run(jobs) == expected
    counted = harness.stats()
    assert (counted["drafted_tokens"], counted["accepted_tokens"]) == drafts
    assert counted["tokens_by_depth"][6] == sum(depths.count(6) for _, depths in expected)
    by_vllm = [harness.counter(f"vllm:spec_decode_num_{one}_tokens") for one in COUNTED]
    # Requests in mode "defer" draft too, and all of that stands.
    assert by_vllm[0] - by_vllm[1] == drafts[0] - drafts[1]
    assert by_vllm[0] > drafts[0]
    assert harness.run(jobs, every=3) == expected
    assert [harness.run([one]) for one in jobs[:2]] == [[one] for one in expected[:2]]


def test_the_plain_way_to_run_mixed_batches(start, model, jobs, expected) -> None:
    """It cannot take up tokens where they wait, so nothing is drafted."""
    harness = start(model, exits={**ALWAYS, "exit_path": "masked"}, enable_prefix_caching=False)
    assert harness.run(jobs) == expected


def test_preempted_requests(start, model, jobs, expected, few_blocks) -> None:
    harness = start(model, exits=ALWAYS, max_num_batched_tokens=128, **few_blocks)
    assert harness.run(jobs) == expected
    assert harness.run(jobs, every=2) == expected
    assert harness.counter("vllm:num_preemptions") > 0
    # Drafts that a preemption takes away are nobody's.
    counted = harness.stats()
    by_vllm = [harness.counter(f"vllm:spec_decode_num_{one}_tokens") for one in COUNTED]
    assert by_vllm[0] - by_vllm[1] == counted["drafted_tokens"] - counted["accepted_tokens"] > 0


def test_up_to_the_end_of_the_context(start, model, job, random_jobs, reference, expect) -> None:
    """Drafts stop in time, and rows of other modes are sent none."""
    prompts = [one.prompt[:20] for one in random_jobs(count=4)]
    confident = {"exit_threshold": 0.1, "exit_mode": "confidence"}
    fields = [verified(0.06), verified(0.1), confident, {"exit_layer": 2}]
    jobs = [job(p, f, 64 - len(p)) for p, f in zip(prompts, fields, strict=True)]
    harness = start(model, exits=ALWAYS, max_model_len=64, enable_prefix_caching=False)
    assert harness.run(jobs) == [expect(reference, one) for one in jobs]


def test_the_prefix_cache_holds_what_full_depth_would(start, model, job, random_jobs) -> None:
    harness = start(model, exits=ALWAYS, block_size=32, disable_log_stats=False)
    prompt = random_jobs()[0].prompt
    early = job(prompt, verified(0.06), max_tokens=4 * 32 - len(prompt) + 1)
    ((said, _),) = harness.run([early])
    follow_ups = [
        job(early.prompt + said, fields, max_tokens=24)
        for fields in ({"exit_threshold": 1.0}, verified(0.1))
    ]
    hits = harness.counter("vllm:prefix_cache_hits")
    cached, read = harness.run(follow_ups), harness.logprobs(early.prompt + said)
    assert harness.counter("vllm:prefix_cache_hits") >= hits + 2 * 96
    harness.engine.reset_prefix_cache()
    assert [harness.run([one])[0] for one in follow_ups] == cached
    # Keys and values, seen through what attends to them: float32 sums in another order.
    harness.engine.reset_prefix_cache()
    for mine, theirs in zip(read, harness.logprobs(early.prompt + said), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


def test_sampling_has_the_distribution_of_full_depth(start, make_checkpoint, oracle) -> None:
    model = make_checkpoint("llama", vocab_size=16)
    harness = start(model, exits=ALWAYS, skip_tokenizer_init=True)
    seen = sampled_pairs(harness.engine, PROMPT, verified(0.25))
    counted = harness.stats()
    assert counted["drafted_tokens"] > counted["accepted_tokens"] > seen.total() / 8
    expected = expected_pairs(oracle(model), PROMPT, ExitPolicy.off())
    assert p_value(seen, expected) > LEVEL
