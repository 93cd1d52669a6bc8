"""The pass of `head_losses` over the logits: norm, head and losses, a chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from exitserve_kernels.logit_losses import logit_losses
from exitserve_training.losses.head import OutputHead, Reading, Teacher, TokenLosses

_BLOCK_ROWS = 8192
"""Rows of the head's gradient [V, D] that a chunk's product in fewer digits holds at once."""


@dataclass(frozen=True)
class Job:
    """What the autograd function needs besides the tensors it differentiates by."""

    head: OutputHead
    readings: Sequence[Reading]
    teacher: Teacher | None
    chunk_tokens: int
    names: tuple[str, ...]
    """The norm's trainable tensors."""
    differentiate: bool


class Part(NamedTuple):
    """A reading's tokens in a chunk."""

    tokens: slice
    """Of its M."""
    rows: slice | Tensor
    """Of its N."""
    among: slice | Tensor
    """Of the chunk's tokens, which the teacher reads."""


def chunks(job: Job) -> Iterator[tuple[slice | Tensor, list[Part]]]:
    """Chunk by chunk: which of the N tokens the teacher reads, and each reading's part of them."""
    first = job.readings[0].rows
    if all(reading.rows is first for reading in job.readings):
        most = max(map(len, job.readings))
        for part in _pieces(most, job.chunk_tokens):
            rows = part if first is None else first[part]
            yield rows, [Part(part, rows, slice(None)) for _ in job.readings]
        return
    # Layers whose counted tokens differ: chunks are of all tokens, of which each takes its own.
    pieces = list(_pieces(max(len(one.hidden) for one in job.readings), job.chunk_tokens))
    edges = torch.tensor(
        [0, *(piece.stop for piece in pieces)], device=job.readings[0].hidden.device
    )
    places = [
        None if one.rows is None else torch.searchsorted(one.rows, edges).tolist()
        for one in job.readings
    ]
    for number, piece in enumerate(pieces):
        parts = []
        for reading, ends in zip(job.readings, places, strict=True):
            if reading.rows is None or ends is None:
                parts.append(Part(piece, piece, slice(None)))
                continue
            tokens = slice(ends[number], ends[number + 1])
            rows = reading.rows[tokens]
            parts.append(Part(tokens, rows, rows - piece.start))
        yield piece, parts


class _Linear:
    """A linear map in the dtype of products, with room for the logits of a chunk.

    Memory fresh from the system would cost more than a softmax.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int) -> None:
        dtype = _product_dtype(weight)
        self.weight = weight.detach().to(dtype)
        self.bias = None if bias is None else bias.detach().to(dtype)
        self.room = self.weight.new_empty(rows, len(weight))

    def __call__(self, features: Tensor) -> Tensor:
        """Logits [n, V] of normed states [n, D], until the next call."""
        logits = self.room[: len(features)]
        # The dtypes are chosen by now. Autocast would keep a copy of the weight once more.
        with torch.autocast(self.room.device.type, enabled=False):
            if self.bias is None:
                return torch.mm(features.to(self.weight.dtype), self.weight.t(), out=logits)
            return torch.addmm(
                self.bias, features.to(self.weight.dtype), self.weight.t(), out=logits
            )


class HeadPass:
    """Norm, head and losses, one chunk of tokens after another, forward and backward at once."""

    def __init__(
        self,
        job: Job,
        inputs: Sequence[Tensor | None],
        gradients: Sequence[Tensor | None],
        differentiate: bool,
    ) -> None:
        """Takes weight, bias and the norm's tensors, and the sums of their gradients or None."""
        weight, bias, *known = inputs
        assert weight is not None
        self.norm, self.soft_cap, self.teacher = job.head.norm, job.head.soft_cap, job.teacher
        self.differentiate = differentiate
        self.device, self.sum_dtype = weight.device, sum_dtype_of(weight)
        rows = min(job.chunk_tokens, max(map(len, job.readings)))
        self.linear = _Linear(weight, bias, rows)
        self.weight_grad, self.bias_grad, *known_grads = gradients
        # The norm runs on leaves of its own: hooks of its parameters shall see the whole gradient.
        self.known: dict[str, Tensor] = {}
        self.known_grads: list[Tensor] = []
        for name, value, gradient in zip(job.names, known, known_grads, strict=True):
            if value is not None and gradient is not None:
                self.known[name] = value.detach().requires_grad_()
                self.known_grads.append(gradient)
        self.largest = _largest(job.readings, self.device).to(self.sum_dtype)
        self.teacher_linear: _Linear | None = None
        if self.teacher is not None and any(one.divergence is not None for one in job.readings):
            own = self.teacher.head.linear
            assert isinstance(own, nn.Linear)
            # The same weights need not be cast again, but room of its own.
            self.teacher_linear = _Linear(own.weight, own.bias, job.chunk_tokens)

    def taught(self, rows: slice | Tensor) -> Tensor | None:
        """The teacher's logits [n, V] of a chunk; None without one."""
        if self.teacher is None or self.teacher_linear is None:
            return None
        head = self.teacher.head
        logits = self.teacher_linear(head.norm(self.teacher.hidden[rows]))
        if head.soft_cap is not None:
            logits.div_(head.soft_cap).tanh_().mul_(head.soft_cap)
        return logits

    def run(
        self,
        reading: Reading,
        part: Part,
        losses: TokenLosses,
        taught: Tensor | None,
        *,
        wants_states: bool,
    ) -> Tensor | None:
        """Writes a part's `losses`; adds to the sums; the states' gradient [n, D] if wanted."""
        leaf = reading.hidden[part.rows].detach().requires_grad_(wants_states)
        by = [*([leaf] if wants_states else []), *self.known.values()]
        with torch.set_grad_enabled(bool(by)):
            normed: Tensor = functional_call(self.norm, self.known, (leaf,))
        features = normed.detach().to(self.linear.weight.dtype)
        logits = self.linear(features)
        self._write_losses(reading, part, losses, taught, logits)
        if not self.differentiate:
            return None
        with torch.autocast(self.device.type, enabled=False):
            if self.weight_grad is not None:
                _add_product(self.weight_grad, logits, features)
            if self.bias_grad is not None:
                self.bias_grad += logits.sum(0, dtype=self.sum_dtype)
            if not by:
                return None
            arrived = torch.mm(logits, self.linear.weight).to(normed.dtype)
            found = list(torch.autograd.grad(normed, by, arrived, allow_unused=True))
        gradient = found.pop(0) if wants_states else None
        for total, value in zip(self.known_grads, found, strict=True):
            if value is not None:
                total += value
        return gradient

    def _write_losses(
        self,
        reading: Reading,
        part: Part,
        losses: TokenLosses,
        taught: Tensor | None,
        logits: Tensor,
    ) -> None:
        """The losses of logits [n, V], over which G is written if gradients are wanted."""
        scales = [
            None if scale is None else scale[part.tokens].to(self.sum_dtype) / self.largest
            for scale in (reading.cross_entropy, reading.divergence)
        ]
        asks = reading.divergence is not None and taught is not None
        found = logit_losses(
            logits,
            None if reading.labels is None else reading.labels[part.tokens],
            scales[0],
            taught[part.among] if asks and taught is not None else None,
            scales[1],
            temperature=1.0 if self.teacher is None else self.teacher.temperature,
            soft_cap=self.soft_cap,
            differentiate=self.differentiate,
        )
        for own, value in zip(losses, found, strict=True):
            if own is not None and value is not None:
                own[part.tokens] = value


def _add_product(total: Tensor, outer: Tensor, features: Tensor) -> None:
    """total [V, D] += outer^T [V, n] features [n, D]."""
    if total.dtype == features.dtype:
        total.addmm_(outer.t(), features)
        return
    # The product of a chunk has the dtype of its factors. In blocks, it is never whole.
    for start in range(0, len(total), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        total[block] += torch.mm(outer[:, block].t(), features)


def _pieces(count: int, most: int) -> Iterator[slice]:
    """Cuts `count` tokens into as few pieces as `most` allows, as equal as they can be."""
    pieces = -(-count // most)
    for piece in range(pieces):
        yield slice(piece * count // pieces, (piece + 1) * count // pieces)


def _largest(readings: Sequence[Reading], device: torch.device) -> Tensor:
    """The largest |weight| of any loss, or 1 if all are 0 or there are none."""
    scales = [s for one in readings for s in (one.cross_entropy, one.divergence) if s is not None]
    everything = torch.cat([torch.zeros(1, device=device), *(s.detach().abs() for s in scales)])
    largest = everything.amax()
    return torch.where(largest > 0, largest, 1.0)


def sum_dtype_of(value: Tensor) -> torch.dtype:
    """What sums over a tensor's tokens need: float32 at least."""
    return torch.promote_types(value.dtype, torch.float32)


def _product_dtype(weight: Tensor) -> torch.dtype:
    """What a linear layer multiplies in: autocast's dtype if on (it leaves float64 alone)."""
    device = weight.device.type
    if torch.is_autocast_enabled(device) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return weight.dtype
