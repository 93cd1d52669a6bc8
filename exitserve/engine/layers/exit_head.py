"""The LM head as an exit check: who passes, and the logits of those that do; and as a draft.

Where the checkpoint has exit rows (`exitserve.checkpoint.exit_rows`), checks and drafts read a copy
of these rows; where the head's weights cannot be read (quantised, or of another type), its logits
for them. Requests that need more than the most likely token get the whole head's logits.

Where kernels run (`exitserve_kernels.dispatch`) and the head's weights can be read, one pass over
them checks the rows and writes their logits. Elsewhere the logits are vLLM's own, which has the
head packed for the CPU, or quantised; the check reads them. On a CPU both are compiled as one unit.

With tensor parallelism every rank holds a slice of the vocabulary. A check then exchanges six
numbers a row instead of the logits; every rank computes the same answer from them, so all take
the same branch. They are exchanged as a sum, for which vLLM has a kernel of its own: of zeros but
for one rank's, so it is exact. Logits are gathered for the rows that pass only.

Shapes: N states, D hidden, V vocabulary, R ranks, K rows of the head that checks read in a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)

from exitserve.engine.compat.compiled import compiled_module
from exitserve.engine.compat.weights import packed_linear, readable_head
from exitserve_kernels.dispatch import choose
from exitserve_kernels.exit_check import (
    Criterion,
    Decision,
    ExitCheck,
    Head,
    HostReading,
    check_logits,
    criterion_of,
    finish,
    summarise_logits,
    summarise_slice,
)
from exitserve_kernels.exit_check.reference import FIELDS, read

TOKEN = FIELDS.index("token")
"""Of a summary."""
NOTHING = (-inf, 0.0, 0.0, -inf, 0.0, -inf)
"""The summary of a slice of which nothing is read."""

Limits = tuple[float, float]
"""A row's thresholds: for any token, and for an end of sequence."""


class HeadReading(nn.Module):
    """The rows of the head that checks read, and what they say, for a host that decides."""

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
        """Logits [N, K] of normed states [N, D]; tokens and confidences [2, N] (`HostReading`)."""
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
        exit_rows: Tensor | None,
    ) -> None:
        """Takes the head's parts.

        Args:
            model: a `MultiExitMixin`.
            compute_logits: the model's own, of normed states.
            eos_token_ids: [K] ends of sequence.
            criterion: what confidence is, one of `exitserve.checkpoint.calibration.CRITERIA`.
            exit_rows: tokens of the whole vocabulary, ascending, whose rows checks and drafts read;
                None for all.
        """
        self._criterion: Criterion = criterion_of(criterion)
        self._lm_head = model.output_head()
        self._processor = model.logits_processor
        self._compute_logits = compute_logits
        self._reading = HeadReading(self._read, self._criterion)
        self._ranks = get_tensor_model_parallel_world_size()
        self._rank = get_tensor_model_parallel_rank()
        self._sliced = self._ranks > 1
        shard = self._lm_head.shard_indices
        self._first: int = shard.org_vocab_start_index
        self._columns: int = shard.num_org_elements
        """Tokens of this slice, without padding."""
        padded: int = self._lm_head.num_embeddings_per_partition
        self.width = padded if self._sliced else self._columns
        """Of the logits that `own_logits` gives."""
        self.rows: Tensor | None = None
        """[K] where the tokens that checks read are in this slice; None: all of it is read."""
        self._num_rows = self._processor.org_vocab_size if exit_rows is None else len(exit_rows)
        """Tokens that checks read, in all slices."""
        ends = eos_token_ids.cpu() - self._first
        self._ends = ends[(ends >= 0) & (ends < self._columns)]
        """Ends of sequence, among what checks read in this slice."""
        if exit_rows is not None:
            own = exit_rows - self._first
            own = own[(own >= 0) & (own < self._columns)]
            self._ends = torch.isin(own, self._ends).nonzero().flatten()
            self.rows = own.to(torch.get_default_device())  # where vLLM makes the model
        self._end_places = frozenset(self._ends.tolist())
        self._prepared = False
        self._readable: Head | None = None
        self._product: Callable[[Tensor], Tensor] | None = None
        """With a copy of the exit rows; None where vLLM's own product is taken."""

    def compile_parts(self, vllm_config: Any) -> None:
        """Lets `decide` read logits in one call, which is compiled where vLLM compiles."""
        is_whole = self.rows is None
        self._reading = compiled_module(
            vllm_config,
            f"head_reading_{self._criterion}" + ("" if is_whole else f"_{self._num_rows}"),
            HeadReading,
            HeadReading.forward,
            ["normed"],
            compute_logits=self._compute_logits if is_whole else self._read,
            criterion=self._criterion,
        )

    def warm_up(self, normed: Tensor) -> None:
        """Compiles that, for some states [N, D]."""
        self.prepare(normed.device)
        if self._is_plain:
            self._reading(normed)

    def prepare(self, device: torch.device) -> None:
        """Copies the exit rows once the weights are loaded, before vLLM measures free memory."""
        if self._prepared:
            return
        self._prepared = True
        self._ends, self._nothing = self._ends.to(device), torch.tensor(NOTHING, device=device)
        if self.rows is not None and not len(self.rows):
            return
        found = readable_head(
            self._lm_head, self._processor, self._columns, self._ends, rows=self.rows
        )
        if found is None:
            return
        if choose("exit_check", device) == "triton":
            self._readable = found
        if self.rows is not None and self._readable is None:
            packed = packed_linear(found.weight, found.bias)
            self._product = partial(packed.quant_method.apply, packed, bias=packed.bias)
        elif self.rows is not None:
            self._product = partial(linear, weight=found.weight, bias=found.bias)

    @property
    def _is_plain(self) -> bool:
        """Whether a check takes logits of the rows that it reads, all of them, as on a CPU."""
        return self._readable is None and not self._sliced

    @property
    def reads_whole_logits(self) -> bool:
        """Whether a check takes whole logits of vLLM's own; to be asked once it is prepared."""
        return self._is_plain and self.rows is None

    def draft(self, normed: Tensor) -> Tensor:
        """[N] int64: the most likely token of each normed state [N, D], among the exit rows."""
        self.prepare(normed.device)
        if self.rows is None:
            bias = getattr(self._lm_head, "bias", None)
            found: Tensor = self._processor.get_top_tokens(self._lm_head, normed, bias)
            return found
        if self._sliced:
            never = torch.full((len(normed),), inf, device=normed.device)
            return self._check_slices(normed, never, never)[0].token
        return self.rows[self._read(normed).argmax(dim=-1)]

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
            Who exits [N], and the logits [N, K] that were read of this slice.
        """
        device = normed.device
        self.prepare(device)
        thresholds, end_thresholds = thresholds.to(device), end_thresholds.to(device)
        if self._is_plain:
            logits = self._read(normed)
            return check_logits(
                logits[: len(thresholds)],
                thresholds,
                criterion=self._criterion,
                end_tokens=self._ends,
                end_thresholds=end_thresholds,
            ), logits
        found, logits = self._check_slices(normed, thresholds, end_thresholds)
        return Decision(found.confidence, found.exits), logits

    def decide(self, normed: Tensor, limits: Sequence[Limits]) -> tuple[list[bool], Tensor]:
        """As `check`, for a host that decides: who exits [N]. On a CPU it needs fewer calls."""
        self.prepare(normed.device)
        if self._is_plain:
            logits, columns = self._reading(normed)
            tokens, confidence = HostReading.of(columns[:, : len(limits)])
            exits = [
                found > _rounded(end if ends else other)
                for found, ends, (other, end) in zip(
                    confidence, self._end(tokens, limits, logits), limits, strict=True
                )
            ]
            return exits, logits
        thresholds = torch.tensor(limits, device=normed.device).reshape(-1, 2)
        found, logits = self._check_slices(normed, *thresholds.unbind(dim=-1))
        return found.exits.tolist(), logits

    def _end(self, tokens: Sequence[int], limits: Sequence[Limits], logits: Tensor) -> list[bool]:
        """[N] whether the most likely tokens end the text, or tie with one that does."""
        found = [token in self._end_places for token in tokens]
        # Two that tie have no margin, so it does not matter which of them is the token.
        if self._criterion == "margin" or not len(self._ends):
            return found
        if all(other == end for other, end in limits):
            return found
        some = logits[: len(limits)]
        ties: list[bool] = (some[:, self._ends].amax(dim=-1) == some.amax(dim=-1)).tolist()
        return ties

    def _check_slices(
        self, normed: Tensor, thresholds: Tensor, end_thresholds: Tensor
    ) -> tuple[ExitCheck, Tensor]:
        """As `check`, by the summary of each rank's slice."""
        summary, logits = self._summarise(normed)
        if self.rows is not None and len(self.rows):
            # The places of the most likely tokens become their numbers, NaN whatever it may.
            places = summary[:, TOKEN].long().clamp(0, len(self.rows) - 1)
            summary[:, TOKEN] = (self.rows[places] + self._first).float()
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
            vocab_size=self._num_rows,
            end_thresholds=end_thresholds,
        ), logits

    def _summarise(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """The summary [N, 6] of what is read of this slice, and its logits [N, K]."""
        first = self._first if self.rows is None else 0
        if self.rows is not None and not len(self.rows):  # the exit rows lie in other slices
            return self._nothing.repeat(len(normed), 1), normed.new_empty(len(normed), 0)
        if self._readable is None:
            logits = self._read(normed)
            return summarise_logits(
                logits, criterion=self._criterion, end_tokens=self._ends, first_token=first
            ), logits
        width = self.width if self.rows is None else len(self.rows)
        logits = normed.new_empty(len(normed), width)
        logits[:, self._readable.columns :] = -torch.inf
        kept = logits[:, : self._readable.columns]
        summary = summarise_slice(normed, self._readable, first_token=first, logits=kept)
        return summary, logits

    def _read(self, normed: Tensor) -> Tensor:
        """The logits [N, K] that a check reads of this slice."""
        if self._product is None:
            logits = self.own_logits(normed)
            return logits if self.rows is None else logits[:, self.rows]
        logits = self._product(normed)
        cap, scale = self._processor.soft_cap, self._processor.scale
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits if scale == 1.0 else logits * scale

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
        """Full logits [M, V] of some states, in the order given, from what `check` returned."""
        if list(kept) != list(range(len(checked))):
            checked = checked[torch.tensor(list(kept), dtype=torch.long)]
        if self.rows is not None:
            own = checked
            checked = own.new_full((len(own), self.width), -inf)
            checked[:, self.rows] = own
        return self.gathered(checked)

    def put(self, checked: Tensor, chosen: Tensor, logits: Tensor) -> None:
        """Puts what `check` returned [N, K] into this slice's logits [N, V / R], in place.

        Args:
            checked: [N, K].
            chosen: [N] bool; of others the logits stay as they are.
            logits: [N, V / R]; -inf where nothing was read.
        """
        if self.rows is None:
            torch.where(chosen[:, None], checked, logits, out=logits)
            return
        logits.masked_fill_(chosen[:, None], -inf)
        logits[:, self.rows] = torch.where(chosen[:, None], checked, logits[:, self.rows])

    def gathered(self, logits: Tensor) -> Tensor:
        """Full logits [M, V] from every slice's [M, V / R]."""
        if self._sliced and len(logits):
            logits = tensor_model_parallel_all_gather(logits)
        vocab_size: int = self._processor.org_vocab_size
        return logits[..., :vocab_size]


@lru_cache
def _rounded(threshold: float) -> float:
    """A threshold as tensors have it."""
    return torch.tensor(threshold).item()
