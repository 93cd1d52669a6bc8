"""How often an engine should sample pairs of tokens, and whether it does: the chi-squared test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from exitserve.policy import ExitPolicy
from exitserve.reference import Reference

LEVEL = 1e-3
"""p-values below fail; seeds are fixed, so this is no lottery."""
LEAST = 5
"""Expected pairs of a cell: the test needs some. Rare pairs are one cell."""
TEMPERATURE = 0.6
COUNT = 4000
PROMPT = [3, 5, 7, 9]


def sampled_pairs(engine: Any, prompt: Sequence[int], fields: Mapping[str, Any]) -> Counter:
    """The second and third tokens that an engine of this process samples, in many answers."""
    from vllm import SamplingParams

    params = SamplingParams(
        n=COUNT // 4,
        max_tokens=4,
        temperature=TEMPERATURE,
        ignore_eos=True,
        detokenize=False,
        extra_args=dict(fields),
    )
    torch.manual_seed(0)  # of the engine
    prompts = [{"prompt_token_ids": list(prompt)}] * 4
    outputs = engine.generate(prompts, params, use_tqdm=False)
    said = [one.token_ids for output in outputs for one in output.outputs]
    return Counter((tokens[1], tokens[2]) for tokens in said)


def expected_pairs(reference: Reference, prompt: Sequence[int], policy: ExitPolicy) -> torch.Tensor:
    """[V, V] the probability of each second and third token after a prompt, by the oracle."""

    def probabilities(*more: int) -> torch.Tensor:
        logits = reference.trace([*prompt, *more], len(prompt), policy).logits[-1]
        return (logits.double() / TEMPERATURE).softmax(dim=-1)

    first = probabilities()
    size = len(first)
    expected = torch.zeros(size, size, dtype=torch.double)
    for one in range(size):
        second = probabilities(one)
        for two in range(size):
            if first[one] * second[two] > 1e-9:
                expected[two] += first[one] * second[two] * probabilities(one, two)
    return expected


def p_value(seen: Counter[tuple[int, int]], expected: torch.Tensor) -> float:
    """How likely a sample is that fits no better than that of `seen` pairs."""
    count, size = seen.total(), len(expected)
    cells = [(float(expected[a, b]), seen[a, b]) for a in range(size) for b in range(size)]
    rare = [cell for cell in cells if cell[0] * count < LEAST]
    common = [cell for cell in cells if cell[0] * count >= LEAST]
    shares = [sum(cell[0] for cell in rare), *(cell[0] for cell in common)]
    counts = [sum(cell[1] for cell in rare), *(cell[1] for cell in common)]
    distance = sum((n - p * count) ** 2 / (p * count) for n, p in zip(counts, shares, strict=True))
    freedom = torch.tensor((len(counts) - 1) / 2)
    return float(torch.special.gammaincc(freedom, torch.tensor(distance / 2)))
