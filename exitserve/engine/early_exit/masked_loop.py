"""The loop with every row in its place: what a CUDA graph can hold.

All tokens of a pass run all layers together. One that has frozen keeps its state (a select after
each layer), so that the layers above compute its keys and values from it; what else they compute
for it is dropped. Branches are the device's (`when`): a check is made if any row is due for it,
a segment is run if any token still runs, and once none does, propagation fills the rest at once.

Shapes: T tokens, B rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from exitserve.engine.layers.branches import when
from exitserve.engine.layers.exit_head import ExitHead
from exitserve.engine.layers.propagation import Propagation
from exitserve.engine.layers.segments import Ended, Stream, total_of

Places = Tensor | slice
"""Of the rows' tokens among all: [B], or the first B, which takes no kernel to look up."""


class MaskedSegment(NamedTuple):
    """Some layers, after each of which frozen tokens get their state back (`restored`), and the
    final norm behind them."""

    end: int
    """How many layers of the decoder have run after it."""
    run: Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor], Ended]
    """`Segment.masked`, compiled or not."""


class MaskedRows(Protocol):
    """The rows of a pass, as the loop needs them. Everything is on the device."""

    @property
    def places(self) -> Places:
        """[B] the token of each row that may exit: its last."""

    @property
    def padding(self) -> Tensor | None:
        """[T] bool: tokens that only fill up a graph; None where there are none."""

    @property
    def known_depth(self) -> Tensor | None:
        """[T] depths of tokens that were computed once before, full depth for all others."""

    def due(self, layer: int, running: Tensor) -> Tensor:
        """[B] bool: the rows to check after `layer` layers, of those `running` [B] there."""

    def thresholds(self, layer: int) -> tuple[Tensor, Tensor]:
        """[B] for any token, [B] for ends of sequence."""

    def settle(self, layer: int, due: Tensor, passed: Tensor, logits: Tensor) -> Tensor:
        """Takes the outcome of a check: passed [B], and its logits. Returns who exits [B] bool."""

    def count_layers(self, layers: int) -> None:
        """Counts layers that run: for all tokens, while any still does."""


class Room:
    """Where a pass keeps its state: pieces that are captured by themselves find it there again."""

    def __init__(self, like: Tensor) -> None:
        self.hidden, self.residual = torch.empty_like(like), torch.empty_like(like)
        self.state, self.normed = torch.zeros_like(like), torch.empty_like(like)
        self.frozen = like.new_zeros((len(like), 1), dtype=torch.bool)


@dataclass
class MaskedLoop:
    """A model's parts, as the loop needs them."""

    segments: Sequence[MaskedSegment]
    head: ExitHead
    propagation: Propagation
    attending: Callable[[Tensor], AbstractContextManager[None]] = lambda _: nullcontext()
    """Around a segment, given which tokens are frozen [T, 1]: they need not read the cache."""

    def run(
        self, positions: Tensor, hidden: Tensor, rows: MaskedRows, room: Room | None = None
    ) -> Tensor:
        """Runs the embedded tokens [T, D] of a pass; returns their normed states [T, D]."""
        held = _Held(hidden, rows, room or Room(hidden))
        rows.count_layers(self.segments[0].end)
        held.take(*self.segments[0].run(positions, held.hidden, None, held.frozen, held.state))
        was_done: Tensor | None = None
        for segment, following in pairwise(self.segments):
            total = held.total()
            held.freeze(self._check(segment.end, held, rows), total)
            is_done = held.frozen.all()

            def go_on(end: int = segment.end, following: MaskedSegment = following) -> None:
                rows.count_layers(following.end - end)
                with self.attending(held.frozen):
                    held.go_through(following, positions)

            when(~is_done, go_on)
            end = segment.end
            when(  # once: what was done at an earlier exit was filled there
                is_done if was_done is None else is_done & ~was_done,
                lambda end=end: self.propagation.fill(held.state, positions, end),  # type: ignore[misc]
            )
            was_done = is_done
        # Of frozen tokens too: the segments that ran since have normed the same state again.
        return held.normed

    def _check(self, layer: int, held: _Held, rows: MaskedRows) -> Tensor:
        """Checks the rows that are due; returns the tokens [T, 1] that freeze."""
        known = rows.known_depth
        newly = torch.zeros_like(held.frozen) if known is None else (known == layer)[:, None]
        due = rows.due(layer, ~held.frozen[rows.places, 0])

        def check() -> None:
            normed = held.normed[rows.places]  # [B, D]
            found, logits = self.head.check(normed, *rows.thresholds(layer))
            exits = rows.settle(layer, due, found.exits & due, logits)
            own = newly[rows.places, 0]
            own |= exits
            if not isinstance(rows.places, slice):  # else it is a view
                newly[rows.places, 0] = own

        when(due.any(), check)
        return newly


class _Held:
    """The state of a pass: branches write into it, and nothing of it moves."""

    def __init__(self, hidden: Tensor, rows: MaskedRows, room: Room) -> None:
        tokens = len(hidden)
        self.hidden, self._residual = room.hidden[:tokens], room.residual[:tokens]
        self.state, self.normed = room.state[:tokens], room.normed[:tokens]
        """States of frozen tokens; and of all, normed, where they are."""
        self.frozen = room.frozen[:tokens]
        self._is_pair = False
        self.hidden.copy_(hidden)
        self.state.zero_()
        if rows.padding is None:
            self.frozen.zero_()
        else:
            self.frozen.copy_(rows.padding[:, None])

    @property
    def stream(self) -> Stream:
        """The stream [T, D], as layers carry it."""
        return self.hidden, self._residual if self._is_pair else None

    def take(self, normed: Tensor, hidden: Tensor | None, residual: Tensor | None) -> None:
        """Keeps a segment's result."""
        self.normed.copy_(normed)
        if hidden is None:
            return
        self.hidden.copy_(hidden)
        self._is_pair = residual is not None
        if residual is not None:
            self._residual.copy_(residual)

    def go_through(self, segment: MaskedSegment, positions: Tensor) -> None:
        """Runs a segment, from where frozen tokens have their state (`restored`, in place)."""
        if self._is_pair:
            self.hidden.masked_fill_(self.frozen, 0.0)
        stream = self._residual if self._is_pair else self.hidden
        torch.where(self.frozen, self.state, stream, out=stream)
        self.take(*segment.run(positions, *self.stream, self.frozen, self.state))

    def total(self) -> Tensor:
        """The residual stream [T, D]."""
        return torch.where(self.frozen, self.state, total_of(self.stream))

    def freeze(self, newly: Tensor, total: Tensor) -> None:
        """Freezes the tokens [T, 1] at `total` [T, D]."""
        torch.where(newly, total, self.state, out=self.state)
        self.frozen.logical_or_(newly)
