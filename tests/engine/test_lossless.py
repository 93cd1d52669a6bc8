"""Mode "verify" is plain vLLM, token by token, on prompts of three kinds: 40, at night 200."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COUNTS, MAX_TOKENS = [40, pytest.param(200, marks=pytest.mark.nightly)], 24
KINDS = ("code", "prose", "structured")


def passages(pattern: str, count: int) -> list[str]:
    """Starts of this repository's own files, a few lines each, well within the context."""
    found = []
    for path in sorted(ROOT.glob(pattern)):
        lines = path.read_text().splitlines()
        found += ["\n".join(lines[at : at + 6])[:800] for at in range(10, len(lines) - 6, 10)]
    assert len(found) >= count
    return found[:: max(1, len(found) // count)][:count]


@pytest.fixture(params=COUNTS)
def prompts(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    """(kind, text) of each prompt."""
    count: int = request.param
    share = 3 * count // 10
    code = passages("exitserve/**/*.py", count - 2 * share)
    prose = passages("docs/*.md", share)
    made = [("code", text) for text in code] + [("prose", text) for text in prose]
    return made + [("structured", f"{text}\n# as JSON: ") for text in code[:share]]


def sampling(prompts: list[tuple[str, str]]) -> list[object]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    # Of bounded length, so that answers end in the grammar's own way and not at the limit.
    grammar = r'\{"name": "[a-z]{1,8}", "count": [0-9]{1,3}\}'
    return [
        SamplingParams(
            max_tokens=MAX_TOKENS,
            temperature=0,
            structured_outputs=StructuredOutputsParams(regex=grammar)
            if kind == "structured"
            else None,
        )
        for kind, _ in prompts
    ]


def answers(engine, prompts: list[tuple[str, str]]) -> list[tuple[int, ...]]:
    texts = [text for _, text in prompts]
    outputs = engine.generate(texts, sampling(prompts), use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def test_tokens_are_those_of_plain_vllm(start, start_plain, bundled, prompts) -> None:
    """Float32: in bfloat16 a batch of another size may round a near tie the other way."""
    assert {kind for kind, _ in prompts} == set(KINDS)
    options = {"enable_prefix_caching": False, "max_model_len": 512}
    exits = {"mode": "verify", "exit_threshold": 0.3, "exit_rows": "all"}
    expected = answers(start_plain(bundled, **options), prompts)
    assert all(expected), "of a grammar that does not compile, there is no answer"
    harness = start(bundled, exits=exits, disable_log_stats=False, **options)
    verifying = harness.engine
    assert answers(verifying, prompts) == expected, "batch 16"
    alone = [answers(verifying, [prompt])[0] for prompt in prompts[::4]]
    assert alone == expected[::4], "batch 1"
    drafted = harness.counter("vllm:spec_decode_num_draft_tokens")
    accepted = harness.counter("vllm:spec_decode_num_accepted_tokens")
    assert 3 * len(prompts) < accepted < drafted
