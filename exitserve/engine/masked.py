"""The loop with every row in its place: what a CUDA graph can hold.

All tokens of a pass run all layers together. One that has frozen keeps its state (a select after
each layer), so that the layers above compute its keys and values from it; what else they compute
for it is dropped. Branches are the device's (`when`): a check is made if any row is due for it,
a segment is run if any token still runs, and once none does, propagation fills the rest at once.

Shapes: T tokens, B rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from exitserve.engine.branches import when
from exitserve.engine.compiled import RunLayer, Stream, restored
from exitserve.engine.head import CheckedHead
from exitserve.engine.propagation import Propagation


class MaskedSegment(Protocol):
    """Some layers, after each of which frozen tokens get their state back (`restored`)."""

    @property
    def end(self) -> int:
        """How many layers of the decoder have run after it."""

    def __call__(
        self,
        positions: Tensor,
        hidden: Tensor,
        residual: Tensor | None,
        frozen: Tensor,
        state: Tensor,
    ) -> Stream:
        """Runs [T, D], given `frozen` [T, 1] bool and `state` [T, D]."""


class MaskedRows(Protocol):
    """What a pass asks and tells about its rows. Everything is on the device."""

    places: Tensor
    """[B] the token of each row that may exit: its last."""
    freezes: Tensor
    """[B] bool: rows whose token freezes where it exits; others run on."""

    @property
    def padding(self) -> Tensor | None:
        """[T] bool: tokens that are nobody's; None where there are none."""

    @property
    def known_depth(self) -> Tensor | None:
        """[T] depths of tokens that were computed once before, full depth for all others."""

    def due(self, layer: int, running: Tensor) -> Tensor:
        """[B] bool: the rows to check after `layer` layers, of those `running` [B] there."""

    def thresholds(self, layer: int) -> tuple[Tensor, Tensor]:
        """[B] for any token, [B] for ends of sequence."""

    def saw(self, layer: int, due: Tensor, passed: Tensor, logits: Tensor) -> Tensor:
        """Takes the outcome of a check: passed [B], logits [B, V]. Returns who exits [B] bool."""


@dataclass(frozen=True)
class MaskedLayers:
    """A masked segment that is not compiled."""

    layers: tuple[Any, ...]
    end: int
    run_layer: RunLayer

    def __call__(
        self,
        positions: Tensor,
        hidden: Tensor,
        residual: Tensor | None,
        frozen: Tensor,
        state: Tensor,
    ) -> Stream:
        """See `MaskedSegment`."""
        stream: Stream = (hidden, residual)
        for layer in self.layers:
            stream = restored(self.run_layer(layer, positions, stream), frozen, state)
        return stream


@dataclass
class MaskedPass:
    """A model's parts, as the loop needs them."""

    segments: Sequence[MaskedSegment]
    final_norm: Callable[[Tensor, Tensor | None], Tensor]
    head: CheckedHead
    propagation: Propagation

    def run(self, positions: Tensor, hidden: Tensor, rows: MaskedRows) -> Tensor:
        """Runs the embedded tokens [T, D] of a pass; returns their normed states [T, D]."""
        held = _Held(hidden, rows)
        held.take(self.segments[0](positions, hidden, None, held.frozen, held.state))
        for segment, following in pairwise(self.segments):
            total = held.total()
            newly = self._check(segment.end, total, held, rows)
            ran = ~held.frozen.all()
            held.freeze(newly, total)
            runs = ~held.frozen.all()
            when(runs, lambda following=following: held.take(held.through(following, positions)))  # type: ignore[misc]
            end = segment.end
            when(
                ran & ~runs,
                lambda end=end: self.propagation.fill(held.state, positions, end),  # type: ignore[misc]
            )
        return torch.where(held.frozen, held.left, self.final_norm(held.hidden, held.residual))

    def _check(self, layer: int, total: Tensor, held: _Held, rows: MaskedRows) -> Tensor:
        """Checks the rows that are due; returns the tokens [T, 1] that freeze."""
        newly = torch.zeros_like(held.frozen)
        if rows.known_depth is not None:
            newly |= (rows.known_depth == layer)[:, None]
        due = rows.due(layer, ~held.frozen[rows.places, 0])

        def check() -> None:
            normed = self.final_norm(total[rows.places], None)
            found, logits = self.head.check(normed, *rows.thresholds(layer))
            exits = rows.saw(layer, due, found.exits & due, logits)
            held.left[rows.places] = torch.where(exits[:, None], normed, held.left[rows.places])
            newly[rows.places, 0] |= exits & rows.freezes

        when(due.any(), check)
        return newly


class _Held:
    """The state of a pass, in tensors that stay where they are: branches write into them."""

    def __init__(self, hidden: Tensor, rows: MaskedRows) -> None:
        self.hidden = torch.empty_like(hidden)
        self.residual: Tensor | None = None
        self.state = torch.zeros_like(hidden)
        self.left = torch.zeros_like(hidden)
        """Normed states of the tokens that froze."""
        self.frozen = hidden.new_zeros((hidden.shape[0], 1), dtype=torch.bool)
        if rows.padding is not None:
            self.frozen |= rows.padding[:, None]

    def take(self, stream: Stream) -> None:
        """Keeps a segment's result."""
        hidden, residual = stream
        if residual is not None and self.residual is None:
            self.residual = torch.empty_like(hidden)  # the first segment's: never in a branch
        self.hidden.copy_(hidden)
        if residual is not None and self.residual is not None:
            self.residual.copy_(residual)

    def through(self, segment: MaskedSegment, positions: Tensor) -> Stream:
        """What a segment makes of the stream."""
        hidden, residual = restored((self.hidden, self.residual), self.frozen, self.state)
        return segment(positions, hidden, residual, self.frozen, self.state)

    def total(self) -> Tensor:
        """The residual stream [T, D]."""
        own = self.hidden if self.residual is None else self.hidden + self.residual
        return torch.where(self.frozen, self.state, own)

    def freeze(self, newly: Tensor, total: Tensor) -> None:
        """Freezes the tokens [T, 1] at `total` [T, D]."""
        self.state = torch.where(newly, total, self.state)
        self.frozen = self.frozen | newly
