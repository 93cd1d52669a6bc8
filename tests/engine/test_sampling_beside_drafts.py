"""On engines that draft: requests whose logits something reads or changes, and those beside them.

Drafts that exits decided are sampled as they are drafted, with all that their requests ask for; the
pass behind them takes them as they are.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from exitserve.engine.host.loop import HostLoop
from exitserve.policy import ExitPolicy

from .token_pairs import LEVEL, expected_pairs, p_value, sampled_pairs
from .token_pairs import PROMPT as SHORT

DRAFTING = ["def main(", "class A:\n    def __init__(self", "import os\nimport sys\n"]
PROMPT = "def read_lines(path):\n    with open(path"
TOKENS = 32
SAMPLED = {"temperature": 1.0, "seed": 7}
FULL_DEPTH = {"exit_threshold": 1.0}
OPTIONS = {"enable_prefix_caching": False, "max_model_len": 256}


def answers(engine: Any, *requests: tuple[str, dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Tokens and their log-probabilities, of requests that run together."""
    from vllm import SamplingParams

    usual = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    prompts = [prompt for prompt, _ in requests]
    params = [SamplingParams(**usual | fields) for _, fields in requests]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    return [said(one) for one in outputs]


def said(output: Any) -> tuple[Any, Any]:
    """Tokens of an answer, and their log-probabilities by token, if wanted."""
    (answer,) = output.outputs
    told = [{token: one.logprob for token, one in place.items()} for place in answer.logprobs or ()]
    return list(answer.token_ids), told


def close(some: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Answers to compare with: float32 sums differ by less in batches of other sizes."""
    return [(tokens, [pytest.approx(place, abs=1e-3) for place in told]) for tokens, told in some]


@pytest.fixture(scope="module")
def others(start_plain, bundled) -> dict[str, dict[str, Any]]:
    """Fields that need logits, or change them."""
    from vllm.sampling_params import StructuredOutputsParams

    ((free, _),) = answers(start_plain(bundled, **OPTIONS), (PROMPT, {}))
    shape = StructuredOutputsParams(regex=r"[a-z]{4} = [0-9]{3}")
    return {
        "log-probabilities": {"logprobs": 3},
        "a grammar": {"structured_outputs": shape, "ignore_eos": False},
        "min_p": SAMPLED | {"min_p": 0.2},
        "logit_bias": {"logit_bias": {free[2]: -100}},
        "sampling": SAMPLED,
    }


@pytest.mark.parametrize("mode", ["defer", "confidence", "verify"])
def test_nobody_gets_another_answer(
    start, start_plain, bundled, others, mode: str, monkeypatch
) -> None:
    from vllm.v1.sample import rejection_sampler

    calls: Counter[str] = Counter()
    judge = rejection_sampler.rejection_sample

    def judged(*args: Any, **more: Any) -> Any:
        calls["judged"] += 1
        return judge(*args, **more)

    monkeypatch.setattr(rejection_sampler, "rejection_sample", judged)
    plain = start_plain(bundled, **OPTIONS)
    expected = {name: answers(plain, (PROMPT, fields))[0] for name, fields in others.items()}
    unlike = [expected["sampling"], expected["min_p"], *answers(plain, (PROMPT, {}))]
    assert expected["logit_bias"] not in unlike
    assert expected["sampling"] != expected["min_p"], "min_p changes nothing"
    exits = {"mode": mode, "exit_threshold": 0.3, "num_drafts": 4, "exit_checks": "all"}
    engine = start(bundled, exits=exits, **OPTIONS).engine
    drafting = [(prompt, {}) for prompt in DRAFTING]
    alone = answers(engine, *drafting)
    assert bool(calls["judged"]) == (mode == "verify")
    # In mode "verify" all answers are full depth's; elsewhere these ask for it.
    own = {} if mode == "verify" else {"extra_args": FULL_DEPTH}
    for name, fields in others.items():
        found = answers(engine, *drafting, (PROMPT, fields | own))
        assert found == close([*alone, expected[name]]), name
    assert bool(calls["judged"]) == (mode == "verify")


@pytest.fixture
def drafted(monkeypatch) -> list[int]:
    """How many rows drafted, each time that some did."""
    found: list[int] = []
    draft = HostLoop.draft

    def noted(loop: HostLoop, rows: Any) -> None:
        found.append(len(rows))
        draft(loop, rows)

    monkeypatch.setattr(HostLoop, "draft", noted)
    return found


@pytest.mark.parametrize("mode", ["defer", "confidence"])
def test_sampled_tokens_are_drafted(start, bundled, mode: str, drafted) -> None:
    """Of one token that may be drawn, it is the likeliest."""
    exits = {"mode": mode, "exit_threshold": 0.3, "num_drafts": 4, "exit_checks": "all"}
    engine = start(bundled, exits=exits, **OPTIONS).engine
    greedy = answers(engine, *((prompt, {}) for prompt in DRAFTING))
    one = {"temperature": 1.0, "top_k": 1}
    drafted.clear()
    assert answers(engine, *((prompt, one) for prompt in DRAFTING)) == greedy
    assert drafted
    mixed = [(prompt, one if index else {}) for index, prompt in enumerate(DRAFTING)]
    assert answers(engine, *mixed) == greedy


SEEDED = {"temperature": 1.0, "seed": 7}
CHANGED: dict[str, dict[str, Any]] = {
    "a seed": SEEDED,
    "a seed, top-p and top-k": SEEDED | {"top_p": 0.9, "top_k": 50},
    "min_p": SEEDED | {"min_p": 0.2},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 1.0},
    "a seed and penalties": SEEDED | {"frequency_penalty": 1.5},
    "logit_bias": {"logit_bias": {"free": -100}},
    "bad_words": {"bad_words": ["self", "name", "="]},
    "allowed_token_ids": {"allowed_token_ids": list(range(200, 2000))},
    "log-probabilities": {"logprobs": 3, "prompt_logprobs": 2},
    "log-probabilities, a seed and penalties": SEEDED | {"logprobs": 1, "presence_penalty": 1.0},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": ["free"], "max_tokens": 20},
}
"""Fields by what they ask for; "free" is a token of the answer without them."""


def filled(fields: dict[str, Any], free: int) -> dict[str, Any]:
    """Such fields, with `free` in its place."""
    places = {"logit_bias": {free: -100}, "stop_token_ids": [free]}
    return fields | {name: places[name] for name in places if name in fields}


@pytest.mark.parametrize("mode", ["defer", "confidence"])
def test_drafts_are_sampled_with_all_that_is_asked(start, bundled, mode: str, drafted) -> None:
    exits = {"mode": mode, "exit_threshold": 0.3, "exit_checks": "all"}
    one_by_one = start(bundled, exits=exits, **OPTIONS).engine
    free = [tokens[2] for tokens, _ in answers(one_by_one, *((one, {}) for one in DRAFTING))]
    asked = {
        name: [(prompt, filled(fields, own)) for prompt, own in zip(DRAFTING, free, strict=True)]
        for name, fields in CHANGED.items()
    }
    expected = {name: answers(one_by_one, *some) for name, some in asked.items()}
    assert not drafted
    engine = start(bundled, exits=exits | {"num_drafts": 4}, **OPTIONS).engine
    usual = answers(engine, *((one, {}) for one in DRAFTING))
    for name, some in asked.items():
        drafted.clear()
        assert answers(engine, *some) == close(expected[name]), name
        assert expected[name] != usual, f"{name} changes nothing"
        assert drafted.count(len(DRAFTING)) > 1, name
    drafted.clear()
    together = answers(engine, *(one for some in asked.values() for one in some))
    assert together == close([one for some in expected.values() for one in some])
    assert max(drafted) == 16, "as many as run together"


@pytest.mark.parametrize("mode", ["defer", "confidence"])
@pytest.mark.parametrize("scarce", ["blocks", "tokens"])
@pytest.mark.parametrize("verifying", [0, 3])
def test_where_drafts_are_taken_away(
    start, make_checkpoint, few_blocks, mode: str, scarce: str, verifying: int, drafted
) -> None:
    """By a preemption, or in a pass without room for them: then they are drawn anew.

    Seeds and log-probabilities hold, and beside drafts that rejection sampling judges, too.
    """
    from vllm import SamplingParams

    model = make_checkpoint("llama", vocab_size=64)
    exits = {"mode": mode, "exit_threshold": 0.06, "exit_checks": "all"}
    room = {
        "blocks": few_blocks | {"max_num_batched_tokens": 128},
        "tokens": few_blocks | {"max_num_batched_tokens": 16, "num_gpu_blocks_override": None},
    }
    roomy = {"max_model_len": 128, "enable_prefix_caching": False, "skip_tokenizer_init": True}

    def run(harness: Any, full_depth: str) -> list[tuple[Any, Any]]:
        greedy = {"temperature": 0, "extra_args": {"exit_mode": full_depth}}
        asked = [greedy] * verifying + [
            {"seed": seed, "logprobs": (None, 0, 3)[seed % 3]} for seed in range(verifying, 10)
        ]
        params = [
            SamplingParams(max_tokens=90, ignore_eos=True, detokenize=False, **one) for one in asked
        ]
        prompts = [{"prompt_token_ids": [5, 9, 4, one + 2]} for one in range(10)]
        outputs = harness.engine.generate(prompts, params, use_tqdm=False)
        return [said(one) for one in outputs]

    expected = run(start(model, exits=exits, **roomy), "off")
    options = room[scarce] | {"skip_tokenizer_init": True}
    harness = start(model, exits=exits | {"num_drafts": 4}, **options)
    drafted.clear()
    assert run(harness, "verify") == close(expected)
    assert drafted
    if scarce == "blocks":
        assert harness.counter("vllm:num_preemptions") > 0


@pytest.mark.parametrize("mode", ["defer", "confidence"])
def test_sampled_tokens_have_the_distribution_of_their_exits(
    start, make_checkpoint, oracle, mode: str, drafted
) -> None:
    model = make_checkpoint("llama", vocab_size=16)
    exits = {"mode": mode, "exit_threshold": 0.25, "num_drafts": 4, "exit_checks": "all"}
    engine = start(model, exits=exits, skip_tokenizer_init=True).engine
    seen = sampled_pairs(engine, SHORT, {})
    assert sum(drafted) > seen.total() / 2
    policy, reference = ExitPolicy.confidence(0.25, mode=mode), oracle(model)
    reference.screens = {}  # as with all checks
    assert p_value(seen, expected_pairs(reference, SHORT, policy)) > LEVEL
    wrong = expected_pairs(reference, SHORT, ExitPolicy.off())
    assert p_value(seen, wrong) < LEVEL, "the test would not see the difference"
