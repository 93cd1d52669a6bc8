"""On engines that draft: requests whose logits something reads or changes, among those that draft.

Drafts that exits decided are sampled without logits, unless another row's are wanted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

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
