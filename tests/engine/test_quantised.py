"""An 8-bit checkpoint (compressed-tensors, int8 weights and activations) of the bundled model.

Propagation works from dequantised weights where a layer would also round its activations, so the
oracle's tokens are not promised; that the machinery adds up, and full depth is plain vLLM's, is.
"""

from __future__ import annotations

import json
import shutil

import pytest

PROMPTS = ("def add(a, b):\n    return", "import os\n", "class Stack:\n    def", "for i in range(")


@pytest.fixture(scope="module")
def jobs(job, bundled):
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(bundled).encode
    fields = ({"exit_layer": 6}, {"exit_threshold": 1.0}, {"exit_threshold": 0.5}, {})
    return [
        job(encode(prompt), field, max_tokens=32)
        for prompt, field in zip(PROMPTS, fields, strict=True)
    ]


def test_rows_exit_and_full_depth_is_plain_vllm(start, start_plain, quantised, jobs) -> None:
    harness = start(quantised, dtype="bfloat16", enable_prefix_caching=False)
    outcomes = harness.run(jobs)
    assert set(outcomes[0][1][1:]) == {6}
    assert {3, 12} <= set(outcomes[2][1])

    from vllm import SamplingParams

    plain = start_plain(quantised, dtype="bfloat16")
    prompts = [{"prompt_token_ids": one.prompt} for one in jobs]
    answers = plain.generate(
        prompts, SamplingParams(max_tokens=32, temperature=0, ignore_eos=True), use_tqdm=False
    )
    for index in (1, 3):
        assert outcomes[index][0] == list(answers[index].outputs[0].token_ids)


def test_compacted_rows_are_the_masked_ones(start, quantised, jobs) -> None:
    """The propagated cache differs by rounding only, which these prompts do not feel."""
    results = []
    for path in ("host", "masked"):
        harness = start(
            quantised, dtype="bfloat16", exits={"exit_path": path}, enable_prefix_caching=False
        )
        results.append(harness.run(jobs))
    same = [
        one == other
        for (ours, _), (theirs, _) in zip(*results, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    ]
    assert sum(same) / len(same) > 0.9


def test_fixed_scales_of_activations_are_refused(start, quantised, tmp_path) -> None:
    fixed = tmp_path / "fixed"
    shutil.copytree(quantised, fixed)
    config = json.loads((fixed / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    group["input_activations"] |= {"dynamic": False, "strategy": "tensor"}
    (fixed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="does not support activations quantised by scales"):
        start(fixed, dtype="bfloat16", enable_prefix_caching=False)
