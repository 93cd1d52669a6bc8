"""The head of drafts: the rows of the LM head that belong to frequent tokens, or all of them.

The judge reads the whole head, so with a part of it nothing is lost but drafts of rare tokens
(`exitserve.checkpoint.draft_tokens`).

Shapes: B rows, D hidden, N tokens that may be drafted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_world_size

from exitserve.engine.compat.weights import PackedLinear, readable_head


class DraftHead:
    """Greedy tokens of drafts."""

    def __init__(self, lm_head: Any, processor: Any, token_ids: Tensor | None) -> None:
        """Takes vLLM's head and its processor, and the tokens [N] to draft; None for all."""
        self._lm_head, self._processor, self._ids = lm_head, processor, token_ids
        self._prepared = False
        self._part: PackedLinear | None = None
        """The rows of the tokens [N]; None where the whole head drafts."""

    def tokens(self, normed: Tensor) -> Tensor:
        """[B] int64: the most likely token of each normed state [B, D]."""
        if not self._prepared:  # weights are loaded once the first states are there
            self._prepared = True
            self._prepare(normed.device)
        if self._part is None or self._ids is None:
            bias = getattr(self._lm_head, "bias", None)
            found: Tensor = self._processor.get_top_tokens(self._lm_head, normed, bias)
            return found
        # Caps and scales of logits are increasing: the largest stays the largest.
        return self._ids[self._part(normed).argmax(dim=-1)]

    def _prepare(self, device: torch.device) -> None:
        """Copies the rows, where they are fewer and can be read."""
        # Each rank reads a slice of the whole head, which is little by itself.
        if self._ids is None or get_tensor_model_parallel_world_size() > 1:
            return
        none = torch.empty(0, dtype=torch.long, device=device)
        columns = self._lm_head.shard_indices.num_org_elements
        head = readable_head(self._lm_head, self._processor, columns, none)
        if head is not None:
            self._ids = self._ids.to(device)
            bias = None if head.bias is None else head.bias[self._ids]
            self._part = PackedLinear(head.weight[self._ids], bias)
