"""On engines that draft: requests whose logits something reads or changes, among those that draft.

Drafts that exits decided are sampled without logits, unless another row's are wanted.
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
    return [(list(one.outputs[0].token_ids), told(one.outputs[0].logprobs)) for one in outputs]


def told(logprobs: Any) -> Any:
    """Log-probabilities by token, to what float32 sums differ by in batches of other sizes."""
    return logprobs and [
        {token: round(one.logprob, 2) for token, one in place.items()} for place in logprobs
    ]


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
        assert found == [*alone, expected[name]], name
    assert calls["judged"], "log-probabilities need the logits of all rows"


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
    drafted.clear()
    assert answers(engine, *((prompt, one | {"seed": 3}) for prompt in DRAFTING)) == greedy
    assert not drafted, "a seed's numbers are for vLLM's sampler"


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


@pytest.mark.parametrize("mode", ["defer", "verify"])
def test_nobody_waits_for_drafts_of_others(start, bundled, mode: str, drafted) -> None:
    """A request that cannot draft would get one token where others get five."""
    exits = {"mode": mode, "exit_threshold": 0.3, "num_drafts": 4}
    engine = start(bundled, exits=exits, **OPTIONS).engine
    other = {"extra_args": FULL_DEPTH}
    alone = answers(engine, (DRAFTING[0], {}), (DRAFTING[1], {}))
    assert drafted
    drafted.clear()
    assert answers(engine, (DRAFTING[0], {}), (DRAFTING[1], {}), (PROMPT, other))[:2] == alone
    assert not drafted
