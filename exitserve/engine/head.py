"""The LM head as an exit check: confidence, and the logits of those that pass.

With tensor parallelism every rank holds a slice of the vocabulary. A check then exchanges three
numbers a row instead of the logits; every rank computes the same answer from them, so all take
the same branch. Logits are gathered for the rows that pass only.

Shapes: N rows, V vocabulary, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather

from exitserve.confidence import join_slices, max_prob, slice_summary


class CheckedHead:
    """The head of one model."""

    def __init__(
        self,
        model: Any,
        compute_logits: Callable[[Tensor], Tensor | None],
        eos_token_ids: Tensor,
    ) -> None:
        """Takes the head's parts.

        Args:
            model: has vLLM's `lm_head` and `logits_processor`.
            compute_logits: the model's own, of normed states.
            eos_token_ids: [K] ends of sequence.
        """
        self._model = model
        self._compute_logits = compute_logits
        self._eos_token_ids = eos_token_ids
        self._sliced = get_tensor_model_parallel_world_size() > 1

    def check(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Confidences [N], ends of sequence [N], and what `logits_of` needs, of normed states."""
        if not self._sliced:
            logits = self._compute_logits(normed)
            assert logits is not None
            return (*max_prob(logits, self._eos_token_ids), logits)
        head = self._model.lm_head
        logits = self._model.logits_processor(
            head, normed, getattr(head, "bias", None), skip_gather=True
        )
        shard = head.shard_indices
        if shard.num_org_vocab_padding:
            logits[..., -shard.num_org_vocab_padding :] = -torch.inf
        columns = self._eos_token_ids - shard.org_vocab_start_index
        columns = columns[(columns >= 0) & (columns < logits.shape[-1])]
        own = slice_summary(logits, columns)  # [N, 3]
        all_ranks = tensor_model_parallel_all_gather(own, dim=-1).view(own.shape[0], -1, 3)
        return (*join_slices(all_ranks), logits)

    def logits_of(self, checked: Tensor, passed: list[bool]) -> Tensor:
        """Full logits [M, V] of the rows that passed, from what `check` returned."""
        kept = checked if all(passed) else checked[torch.tensor(passed)]
        if not self._sliced or not kept.shape[0]:
            return kept
        full: Tensor = tensor_model_parallel_all_gather(kept)
        return full[..., : self._model.logits_processor.org_vocab_size]
