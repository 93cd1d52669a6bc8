"""Without exits the engine is plain vLLM: same tokens, and log-probabilities within rounding."""

import pytest

PROMPTS = ("def add(a, b):\n    return", "import os\n", "class Stack:\n    def")

# Same operations in the same order on the same machine; what may differ is how a library splits
# a sum, which is some float32 rounding steps (2^-24 of a value of order 10).
ROUNDING = 1e-4


def _answers(engine, **fields):
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=32, temperature=0, logprobs=3, ignore_eos=True, extra_args=fields or None
    )
    outputs = engine.generate(list(PROMPTS), params, use_tqdm=False)
    return [
        (
            list(output.outputs[0].token_ids),
            [{t: v.logprob for t, v in step.items()} for step in output.outputs[0].logprobs],
        )
        for output in outputs
    ]


@pytest.fixture(scope="module")
def plain(start_plain, bundled):
    return _answers(start_plain(bundled))


def _same(answers, plain) -> None:
    for (tokens, logprobs), (plain_tokens, plain_logprobs) in zip(answers, plain, strict=True):
        assert tokens == plain_tokens
        for step, plain_step in zip(logprobs, plain_logprobs, strict=True):
            assert step == pytest.approx(plain_step, abs=ROUNDING)


def test_full_depth_requests_are_plain_vllm(start, bundled, plain) -> None:
    engine = start(bundled, exits={"exit_threshold": 0.5}).engine
    _same(_answers(engine, exit_threshold=1.0), plain)
    _same(_answers(engine, exit_threshold=7), plain)
    early = _answers(engine)
    assert [tokens for tokens, _ in early] != [tokens for tokens, _ in plain], "no exit fired"


def test_a_server_without_exit_layers_is_plain_vllm(start, bundled, plain) -> None:
    engine = start(bundled, exits={"exit_layers": []}).engine
    _same(_answers(engine, exit_threshold=0.1), plain)
