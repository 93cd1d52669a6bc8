"""The LM head as an exit check: who passes, and the logits of those that do.

Where kernels run (`exitserve_kernels.dispatch`) and the head's weights can be read, one pass over
them checks the rows and writes their logits. Elsewhere the logits are vLLM's own, which has the
head packed for the CPU, or quantised; the check reads them. On a CPU both are compiled as one unit.

With tensor parallelism every rank holds a slice of the vocabulary. A check then exchanges six
numbers a row instead of the logits; every rank computes the same answer from them, so all take
the same branch. They are exchanged as a sum, for which vLLM has a kernel of its own: of zeros but
for one rank's, so it is exact. Logits are gathered for the rows that pass only.

Shapes: N rows, V vocabulary, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)

from exitserve.engine.compat.compiled import compiled_module
from exitserve.engine.compat.weights import readable_head
from exitserve.screens import Screens
from exitserve_kernels.dispatch import choose
from exitserve_kernels.exit_check import (
    Criterion,
    Decision,
    ExitCheck,
    Head,
    Reading,
    check_logits,
    criterion_of,
    finish,
    summarise_logits,
    summarise_slice,
)
from exitserve_kernels.exit_check.reference import read

LEAST_SCORES = 1024
"""Scores kept, of so many pairs of exit layer and threshold."""

Limits = tuple[float, float]
"""A row's thresholds: for any token, and for an end of sequence."""


@dataclass(frozen=True)
class HostDecision:
    """What a check found, for a host that decides: of N rows, as numbers of Python's."""

    tokens: list[int]
    """[N] the most likely."""
    confidence: list[float]
    """[N]."""
    exits: list[bool]
    """[N]."""


class HeadReading(nn.Module):
    """The whole head, and what its logits say, for a host that decides."""

    def __init__(
        self,
        compute_logits: Callable[[Tensor], Tensor],
        criterion: Criterion,
        *,
        vllm_config: Any = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.compute_logits, self.criterion = compute_logits, criterion

    def forward(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [N, V] of normed states [N, D]; tokens and confidences [2, N] (`Reading`)."""
        logits = self.compute_logits(normed)
        return logits, read(logits, self.criterion)


class ExitHead:
    """The head of one model: on each rank, its slice of the vocabulary."""

    def __init__(
        self,
        model: Any,
        compute_logits: Callable[[Tensor], Tensor | None],
        eos_token_ids: Tensor,
        criterion: str,
        screens: Screens,
        break_even: Mapping[int, float],
    ) -> None:
        """Takes the head's parts.

        Args:
            model: a `Family`.
            compute_logits: the model's own, of normed states.
            eos_token_ids: [K] ends of sequence.
            criterion: what confidence is, one of `exitserve.checkpoint.calibration.CRITERIA`.
            screens: by exit layer, what decides which rows are worth a check; where there is none,
                every check is made.
            break_even: by exit layer, the chance to pass from which a check pays.
        """
        device = torch.get_default_device()  # where vLLM makes the model
        self.screens = {k: one.to(device) for k, one in screens.items() if k in break_even}
        self._break_even = break_even
        self.least_score = lru_cache(LEAST_SCORES)(self._least_score)
        """The score above which a check after so many layers is made, for a threshold."""
        self._criterion: Criterion = criterion_of(criterion)
        self._lm_head = model.output_head()
        self._processor = model.logits_processor
        self._compute_logits = compute_logits
        self._reading = HeadReading(self.own_logits, self._criterion)
        self._ranks = get_tensor_model_parallel_world_size()
        self._rank = get_tensor_model_parallel_rank()
        self._sliced = self._ranks > 1
        shard = self._lm_head.shard_indices
        self._first: int = shard.org_vocab_start_index
        self._columns: int = shard.num_org_elements
        """Tokens of this slice, without padding."""
        padded: int = self._lm_head.num_embeddings_per_partition
        self.width = padded if self._sliced else self._columns
        """Of the logits that `check` and `own_logits` give."""
        self.end_ids = frozenset(eos_token_ids.tolist())
        """Ends of sequence, of the whole vocabulary."""
        ends = eos_token_ids - self._first
        self._ends = ends[(ends >= 0) & (ends < self._columns)]
        self._prepared = False
        self._readable: Head | None = None

    def compile_parts(self, vllm_config: Any) -> None:
        """Lets `decide` read whole logits in one call, which is compiled where vLLM compiles."""
        self._reading = compiled_module(
            vllm_config,
            f"head_reading_{self._criterion}",
            HeadReading,
            HeadReading.forward,
            ["normed"],
            compute_logits=self._compute_logits,
            criterion=self._criterion,
        )

    def warm_up(self, normed: Tensor) -> None:
        """Compiles that, for some states [N, D]."""
        if self.is_whole(normed.device):
            self._reading(normed)

    def _least_score(self, layer: int, threshold: float) -> float:
        screen = self.screens.get(layer)
        return -inf if screen is None else screen.least_score(threshold, self._break_even[layer])

    def check(
        self, normed: Tensor, thresholds: Tensor, end_thresholds: Tensor
    ) -> tuple[Decision, Tensor]:
        """Checks states [N, D] against thresholds [N] for any token and for ends [N].

        Args:
            normed: [N, D] normed states; more than thresholds where only the logits of the last
                ones are wanted.
            thresholds: [N] for any token.
            end_thresholds: [N] for ends of sequence.

        Returns:
            Who exits [N], and what `logits_of` needs.
        """
        device = normed.device
        thresholds, end_thresholds = thresholds.to(device), end_thresholds.to(device)
        if self.is_whole(device):
            logits = self.own_logits(normed)
            return check_logits(
                logits[: len(thresholds)],
                thresholds,
                criterion=self._criterion,
                end_tokens=self._ends,
                end_thresholds=end_thresholds,
            ), logits
        found, logits = self._check_slices(normed, thresholds, end_thresholds)
        return Decision(found.confidence, found.exits), logits

    def decide(self, normed: Tensor, limits: Sequence[Limits]) -> tuple[HostDecision, Tensor]:
        """As `check`, for a host that decides: on a CPU it needs fewer calls."""
        if self.is_whole(normed.device):
            logits, columns = self._reading(normed)
            tokens, confidence = Reading.of(columns[:, : len(limits)])
            exits = [
                found > _rounded(end if ends else other)
                for found, ends, (other, end) in zip(
                    confidence, self._end(tokens, limits, logits), limits, strict=True
                )
            ]
            return HostDecision(tokens, confidence, exits), logits
        thresholds = torch.tensor(limits, device=normed.device).reshape(-1, 2)
        found, logits = self._check_slices(normed, *thresholds.unbind(dim=-1))
        columns = (found.token, found.confidence, found.exits)
        return HostDecision(*(one.tolist() for one in columns)), logits

    def _end(self, tokens: Sequence[int], limits: Sequence[Limits], logits: Tensor) -> list[bool]:
        """[N] whether the most likely tokens end the text, or tie with one that does."""
        found = [token in self.end_ids for token in tokens]
        # Two that tie have no margin, so it does not matter which of them is the token.
        if self._criterion == "margin" or not len(self._ends):
            return found
        if all(other == end for other, end in limits):
            return found
        some = logits[: len(limits)]
        ties: list[bool] = (some[:, self._ends].amax(dim=-1) == some.amax(dim=-1)).tolist()
        return ties

    def is_whole(self, device: torch.device) -> bool:
        """Whether a check takes whole logits of vLLM's own, as on a CPU."""
        if not self._prepared:  # weights are there once the first check is made
            self._prepared = True
            self._ends = self._ends.to(device)
            if choose("exit_check", device) == "triton":
                self._readable = readable_head(
                    self._lm_head, self._processor, self._columns, self._ends
                )
        return self._readable is None and not self._sliced

    def _check_slices(
        self, normed: Tensor, thresholds: Tensor, end_thresholds: Tensor
    ) -> tuple[ExitCheck, Tensor]:
        """As `check`, by the summary of each rank's slice."""
        if self._readable is None:
            logits = self.own_logits(normed)
            summary = summarise_logits(
                logits,
                criterion=self._criterion,
                end_tokens=self._ends,
                first_token=self._first,
            )
        else:
            logits = normed.new_empty(len(normed), self.width)
            logits[:, self._columns :] = -torch.inf
            kept = logits[:, : self._columns]
            summary = summarise_slice(normed, self._readable, first_token=self._first, logits=kept)
        summary = summary[: len(thresholds)]
        slices = summary[:, None]  # [N, R, 6]
        if self._sliced:
            own = summary.new_zeros(len(summary), self._ranks, summary.shape[-1])
            own[:, self._rank] = summary
            slices = tensor_model_parallel_all_reduce(own)
        return finish(
            slices,
            thresholds,
            criterion=self._criterion,
            vocab_size=self._processor.org_vocab_size,
            end_thresholds=end_thresholds,
        ), logits

    def room(self, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for the logits of some rows, from states of a type."""
        own = self._processor.head_dtype or dtype
        return torch.zeros((rows, self.width), dtype=own, device=device)

    def own_logits(self, normed: Tensor) -> Tensor:
        """This slice's logits [N, V / R], -inf where padded, as vLLM computes them."""
        if not self._sliced:
            whole = self._compute_logits(normed)
            assert whole is not None
            return whole
        head = self._lm_head
        logits: Tensor = self._processor(
            head, normed, getattr(head, "bias", None), skip_gather=True
        )
        logits[:, self._columns :] = -torch.inf
        return logits

    def logits_of(self, checked: Tensor, kept: Sequence[int]) -> Tensor:
        """Full logits [M, V] of some rows, in the order given, from what `check` returned."""
        rows = list(kept)
        if rows != list(range(len(checked))):
            checked = checked[torch.tensor(rows, dtype=torch.long)]
        if self._sliced and rows:
            checked = tensor_model_parallel_all_gather(checked)
        return checked[..., : self._processor.org_vocab_size]


@lru_cache
def _rounded(threshold: float) -> float:
    """A threshold as tensors have it."""
    return torch.tensor(threshold).item()
