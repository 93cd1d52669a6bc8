"""Tokens drawn beside the model runner's batch, by vLLM's own sampler.

Read from `vllm/v1/sample/sampler.py` and `vllm/v1/sample/ops/topk_topp_sampler.py`.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_world_size, get_tp_group
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler


@dataclass(frozen=True)
class Sampling:
    """How a request that is not greedy draws its tokens."""

    temperature: float
    top_k: int
    """0 or less: all tokens."""
    top_p: float


def drawn(logits: Tensor, ways: Sequence[Sampling]) -> list[int]:
    """Draws a token for each row of logits [N, V], the same on all ranks.

    Args:
        logits: [N, V].
        ways: [N].
    """
    everything = logits.shape[-1]
    kept = [one.top_k if 0 < one.top_k < everything else everything for one in ways]
    top_k = torch.tensor(kept) if min(kept) < everything else None
    shares = [one.top_p for one in ways]
    top_p = torch.tensor(shares) if min(shares) < 1.0 else None
    temperature = torch.tensor([[one.temperature] for one in ways])
    tokens, _ = _sampler()(logits.float() / temperature, {}, top_k, top_p)
    if get_tensor_model_parallel_world_size() > 1:
        tokens = get_tp_group().broadcast(tokens, src=0)
    found: list[int] = tokens.tolist()
    return found


@lru_cache(maxsize=1)
def _sampler() -> Any:
    return TopKTopPSampler()
