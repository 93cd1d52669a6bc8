"""Quantised checkpoints of the bundled model: int8 weights and activations, 4-bit weights.

Propagation works from dequantised weights where a layer of 8 bits would also round its activations,
so the oracle's tokens are not promised; that the machinery adds up, and full depth is plain vLLM's,
is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PROMPTS = ("def add(a, b):\n    return", "import os\n", "class Stack:\n    def", "for i in range(")


@pytest.fixture(scope="module")
def jobs(job, bundled):
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(bundled).encode
    fields = ({"exit_layer": 12}, {"exit_threshold": 1.0}, {"exit_threshold": 0.5}, {})
    return [
        job(encode(prompt), field, max_tokens=32)
        for prompt, field in zip(PROMPTS, fields, strict=True)
    ]


def test_rows_exit_and_full_depth_is_plain_vllm(start, start_plain, quantised, jobs) -> None:
    harness = start(quantised, dtype="bfloat16", enable_prefix_caching=False)
    outcomes = harness.run(jobs)
    assert set(outcomes[0][1][1:]) == {12}
    assert {6, 24} <= set(outcomes[2][1])

    from vllm import SamplingParams

    plain = start_plain(quantised, dtype="bfloat16")
    prompts = [{"prompt_token_ids": one.prompt} for one in jobs]
    answers = plain.generate(
        prompts, SamplingParams(max_tokens=32, temperature=0, ignore_eos=True), use_tqdm=False
    )
    for index in (1, 3):
        assert outcomes[index][0] == list(answers[index].outputs[0].token_ids)


def packed(numbers: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """[I, O] of 0 to 15 as int32 [I, O / 8], eight in each."""
    parts = numbers.long().unflatten(1, (-1, 8))
    joined = sum(parts[:, :, place] << 4 * shift for shift, place in enumerate(order))
    return joined.to(torch.int32).contiguous()


def four_bits(weight: Tensor, method: str) -> dict[str, Tensor]:
    """A projection [O, I], rounded to 4 bits in groups of 64 inputs, as a method stores it."""
    groups = weight.T.float().unflatten(0, (-1, 64))
    scales = (groups.abs().amax(dim=1) / 7).half()
    numbers = ((groups / scales[:, None]).round() + 8).clamp(0, 15).flatten(0, 1)
    if method == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        zeros = packed(torch.full(scales.shape, 8), order)
        return {"qweight": packed(numbers, order), "qzeros": zeros, "scales": scales}
    return {
        "qweight": packed(numbers.T).T.contiguous(),
        "qzeros": packed(torch.full(scales.shape, 7)),  # stored less one
        "scales": scales,
        "g_idx": torch.arange(len(numbers), dtype=torch.int32) // 64,
    }


@pytest.fixture(params=["gptq", pytest.param("awq", marks=pytest.mark.nightly)])
def weights_of_four_bits(request, bundled, tmp_path_factory) -> Path:
    """The bundled model with weights of 4 bits."""
    from exitserve.engine.compat.config import lacks_kernel

    method, tensors = request.param, {}
    if lacks_kernel(method):
        pytest.skip("vLLM has no kernel for 4 bits on a CPU without AVX-512")
    directory = tmp_path_factory.mktemp(method)
    shutil.copytree(bundled, directory, dirs_exist_ok=True)
    for name, weight in load_file(bundled / "model.safetensors").items():
        if ".layers." in name and name.endswith("_proj.weight"):
            own = four_bits(weight, method).items()
            tensors |= {f"{name.removesuffix('weight')}{part}": one for part, one in own}
        else:
            tensors[name] = weight
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    shape = {"gptq": {"desc_act": False, "sym": True}, "awq": {"zero_point": True}}[method]
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 64, **shape}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_weights_of_four_bits(start, start_plain, weights_of_four_bits, job, jobs) -> None:
    """Full depth judges drafts by vLLM's own layers, and propagation reads what these multiply."""
    from vllm import SamplingParams

    options = {"dtype": "bfloat16", "enable_prefix_caching": False}
    fields = ({"exit_layer": 12}, {"exit_threshold": 1.0}, {"exit_threshold": 0.5}, {})
    asked = [job(one.prompt, field, max_tokens=32) for one, field in zip(jobs, fields, strict=True)]
    outcomes = start(weights_of_four_bits, exits={"mode": "off"}, **options).run(asked)
    assert set(outcomes[0][1][1:]) == {12} and {6, 24} <= set(outcomes[2][1])
    exits = {"mode": "verify", "exit_threshold": 0.4, "exit_rows": "all"}
    verifying = start(weights_of_four_bits, exits=exits, **options)
    verified = verifying.run([job(one.prompt, {}, max_tokens=32) for one in jobs])
    stats = verifying.stats()
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
    plain = start_plain(weights_of_four_bits, dtype="bfloat16")
    prompts = [{"prompt_token_ids": one.prompt} for one in jobs]
    greedy = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    answers = plain.generate(prompts, greedy, use_tqdm=False)
    said = [list(one.outputs[0].token_ids) for one in answers]
    assert [tokens for tokens, _ in verified] == said
    assert [outcomes[index][0] for index in (1, 3)] == [said[index] for index in (1, 3)]


def test_rows_that_leave_are_those_that_keep_their_places(start, quantised, jobs, request) -> None:
    """The propagated cache differs by rounding only, which these prompts do not feel."""
    harness = start(quantised, dtype="bfloat16", enable_prefix_caching=False)
    left = harness.run(jobs)
    request.getfixturevalue("masked")
    same = [
        one == other
        for (ours, _), (theirs, _) in zip(left, harness.run(jobs), strict=True)
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
