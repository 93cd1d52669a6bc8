"""Losses of logits and their gradient in PyTorch, with little memory: the form without a GPU.

A few rows at a time, and each operation writes to memory that is there: fresh memory costs more
than the arithmetic. The library's softmax is vectorised, which exp() by itself is not. It keeps no
sum of powers, but its greatest entry is 1 / sum exp(x - max x).

Shapes: N tokens, V vocabulary; n tokens of a slice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_SLICE_ELEMENTS = 2**22
"""Logits of a slice, 16 MB a buffer in float32. At [512, 49152], both losses, 2**19 takes 0.7 times
as long on one core, for that stays in its cache; but 2**20 takes 3.5 times as long on two cores
that others use too, because the threads wait for each other at every operation."""


def logit_losses(
    logits: Tensor,
    labels: Tensor | None,
    ce_scale: Tensor | None,
    teacher: Tensor | None,
    kl_scale: Tensor | None,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    differentiate: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """See `exitserve_kernels.logit_losses`; computes float64 in float64."""
    count, vocabulary = logits.shape
    size = max(1, min(_SLICE_ELEMENTS // vocabulary, count))
    slices = _Slices(logits, size, temperature, soft_cap)
    losses = [
        None if one is None else logits.new_empty(count, dtype=slices.dtype)
        for one in (labels, teacher)
    ]
    for start in range(0, count, size):
        rows = slice(start, start + size)
        arguments = (labels, ce_scale, teacher, kl_scale)
        chosen = [None if one is None else one[rows] for one in arguments]
        found = slices.run(logits[rows], *chosen, differentiate=differentiate)
        for whole, part in zip(losses, found, strict=True):
            if whole is not None and part is not None:
                whole[rows] = part[:, 0]
    return losses[0], losses[1]


class _Softmax(NamedTuple):
    """Of logits x [n, V]."""

    chances: Tensor
    """[n, V]; each is off by the factor `total`."""
    total: Tensor
    """[n, 1], their sum: 1 up to the library's rounding, which reaches 1e-5 at V = 128000."""
    top: Tensor
    """[n, 1], the greatest of x."""
    log_powers: Tensor
    """[n, 1], log sum exp(x - top)."""


class _Slices:
    """One slice of rows after another, in the same buffers."""

    def __init__(
        self, logits: Tensor, size: int, temperature: float, soft_cap: float | None
    ) -> None:
        self.dtype = torch.promote_types(logits.dtype, torch.float32)
        self.temperature, self.soft_cap = temperature, soft_cap
        self._like, self._size = logits, size
        self._buffers: dict[str, Tensor] = {}

    def run(
        self,
        logits: Tensor,
        labels: Tensor | None,
        ce_scale: Tensor | None,
        teacher: Tensor | None,
        kl_scale: Tensor | None,
        *,
        differentiate: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Both losses [n, 1]; the gradient of logits [n, V] is written over them if wanted."""
        student = self._student(logits)
        cross_entropy = divergence = p = None
        summands = []
        if labels is not None:
            target = labels[:, None]
            p = self._softmax(student, "p")
            cross_entropy = (p.top - student.gather(-1, target)) + p.log_powers
        if teacher is not None:
            divergence, difference, total = self._against(teacher, student, p)
            if kl_scale is not None:
                scale = kl_scale.to(self.dtype)[:, None] / self.temperature
                summands.append((difference, scale / total))
        if p is not None and cross_entropy is not None and ce_scale is not None:
            # p - 1 without cancellation where p is almost 1.
            p.chances.scatter_(-1, target, torch.expm1(-cross_entropy) * p.total)
            summands.append((p.chances, ce_scale.to(self.dtype)[:, None] / p.total))
        if differentiate:
            self._write_gradient(logits, student, summands)
        return cross_entropy, divergence

    def _write_gradient(
        self, logits: Tensor, student: Tensor, summands: list[tuple[Tensor, Tensor]]
    ) -> None:
        """Writes the sum of products [n, V] times [n, 1], times the soft cap's slope."""
        gradient = logits if logits.dtype == self.dtype else self._buffer("gradient", len(logits))
        first, *others = summands
        torch.mul(*first, out=gradient)
        for values, scale in others:
            gradient.addcmul_(values, scale)
        if self.soft_cap is not None:
            gradient *= student.div_(self.soft_cap).square_().neg_().add_(1.0)
        if gradient is not logits:
            logits.copy_(gradient)

    def _student(self, logits: Tensor) -> Tensor:
        """The logits in the type of the sums, soft-capped: themselves if they are that."""
        if self.soft_cap is None and logits.dtype == self.dtype:
            return logits
        values = self._buffer("student", len(logits)).copy_(logits)
        if self.soft_cap is not None:
            values.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return values

    def _against(
        self, teacher: Tensor, student: Tensor, p: _Softmax | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The divergence [n, 1], and P - Q as [n, V] divided by [n, 1].

        `p` is the student's softmax at temperature 1, if there is one.
        """
        if self.temperature != 1.0:
            room = self._buffer("cooled", len(student))
            student, p = torch.div(student, self.temperature, out=room), None
        p = p or self._softmax(student, "p, cooled")
        room = self._buffer("teacher", len(teacher))
        if teacher.dtype != self.dtype or self.temperature != 1.0:
            teacher = room.copy_(teacher)
        if self.temperature != 1.0:
            teacher.div_(self.temperature)
        q = self._softmax(teacher, "q")
        gaps = torch.sub(teacher, student, out=room).mul_(q.chances)
        # Infinite gaps times 0 are left out: 0 log 0 is 0.
        mean_gap = gaps.nansum(-1, keepdim=True) / q.total
        divergence = (mean_gap - (q.top - p.top)) + (p.log_powers - q.log_powers)
        ratio = -p.total / q.total
        return divergence, torch.addcmul(p.chances, q.chances, ratio, out=q.chances), p.total

    def _softmax(self, values: Tensor, name: str) -> _Softmax:
        chances = self._buffer(name, len(values))
        torch.softmax(values, -1, out=chances)
        total, greatest = chances.sum(-1, keepdim=True), chances.amax(-1, keepdim=True)
        return _Softmax(chances, total, values.amax(-1, keepdim=True), (total / greatest).log_())

    def _buffer(self, name: str, rows: int) -> Tensor:
        """[rows, V], made when first asked for."""
        if name not in self._buffers:
            shape = (self._size, self._like.shape[1])
            self._buffers[name] = self._like.new_empty(shape, dtype=self.dtype)
        return self._buffers[name][:rows]
