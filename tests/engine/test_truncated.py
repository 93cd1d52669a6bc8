"""The first layers alone, as a checkpoint in plain vLLM.

What is equal to what. A truncated checkpoint of N layers says, for any text, what the full model's
norm and head say after N layers. Mode "fixed" at layer N says the same of every token that it
generates but the first: prompt tokens run at full depth, so the first generated token is that of
full depth. From the second on, an exited token has run the first N layers, over keys and values of
those layers, which are the truncated model's too, whatever ran above them. So with t the first
token of "fixed": the truncated model, given the prompt and t, goes on as "fixed" does.
"""

from pathlib import Path

import pytest
import torch

from exitserve.cli import main

PROMPTS = ("def add(a, b):\n    return", "import os\n", "class Stack:\n    def", "for i in range(")
DEPTH = 12
LENGTH = 24


@pytest.fixture(scope="module")
def prompts(bundled: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(bundled).encode
    return [encode(prompt) for prompt in PROMPTS]


def _cut(model: Path, folder: Path, layers: int) -> Path:
    out = folder / f"first-{layers}"
    assert main(["truncate", str(model), "--layers", str(layers), "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def truncated(bundled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _cut(bundled, tmp_path_factory.mktemp("truncated"), DEPTH)


@pytest.fixture(scope="module")
def fixed(bundled: Path, prompts, job, start_shared) -> list[list[int]]:
    """Tokens of the full model in mode "fixed"."""
    harness = start_shared(bundled)
    jobs = [job(prompt, {"exit_layer": DEPTH}, max_tokens=LENGTH) for prompt in prompts]
    outcomes = harness.run(jobs)
    assert all(set(depths[1:]) == {DEPTH} for _, depths in outcomes)
    return [tokens for tokens, _ in outcomes]


def test_plain_vllm_says_what_the_layer_says(
    bundled, truncated, prompts, fixed, start_plain
) -> None:
    """First tokens against the full model in transformers, further ones against mode "fixed"."""
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    from exitserve.checkpoint.decoder import capture_hidden, decoder_parts

    full = AutoModelForCausalLM.from_pretrained(bundled, dtype=torch.float32)
    parts = decoder_parts(full)
    firsts = []
    for prompt in prompts:
        with torch.no_grad(), capture_hidden(parts.layers, [DEPTH]) as hidden:
            full(torch.tensor([prompt]))
        firsts.append(int(parts.classify(hidden[DEPTH][0, -1]).argmax()))
    begun = [[*prompt, one[0]] for prompt, one in zip(prompts, fixed, strict=True)]
    engine = start_plain(truncated)
    params = SamplingParams(max_tokens=LENGTH - 1, temperature=0, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in (*prompts, *begun)]
    answers = [list(one.outputs[0].token_ids) for one in engine.generate(inputs, params)]
    assert [answer[0] for answer in answers[: len(prompts)]] == firsts
    assert answers[len(prompts) :] == [one[1:] for one in fixed]
