"""Modes "defer" and "verify": tokens that wait at an exit layer for their deeper layers to run.

A token that exits in mode "defer" leaves its state at the exit layer behind. The next token of its
request that goes on beyond that layer takes it along: several positions of one row run the deeper
layers in one pass, which costs little more than one where decoding is bound by reading weights.
So all keys and values are those of full depth, and the tokens before a token have been through
every layer that it goes through itself.

In mode "verify" the same happens while tokens are drafted, and the pass that judges the drafts
continues each of its tokens from the layer where it waits.

Shapes: K pending tokens, D hidden, G cache groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

MAX_PENDING = 16
"""Tokens of a request that may be pending; one more, and all run their deeper layers."""


PENDING = -1
"""The index of a token that a pass takes along, and that is not one of its own."""


@dataclass(frozen=True)
class Tokens:
    """Some consecutive tokens of one request, in the midst of the layers."""

    state: Tensor
    """[K, D] residual stream."""
    positions: Sequence[int]
    """[K]."""
    slots: Sequence[Sequence[int]]
    """G times [K]: where their keys and values go in the cache."""

    def up_to(self, position: int) -> Tokens:
        """Those at or before a position."""
        kept = sum(one <= position for one in self.positions)
        slots = tuple(group[:kept] for group in self.slots)
        return Tokens(self.state[:kept], self.positions[:kept], slots)

    def indices(self, first: int, start: int) -> list[int]:
        """[K] where they are in a pass whose tokens of this request begin at `start`.

        Args:
            first: position of the first of those.
            start: its index in the pass.
        """
        return [PENDING if one < first else one - first + start for one in self.positions]

    def __len__(self) -> int:
        return len(self.positions)


def joined(parts: Sequence[Tokens]) -> Tokens:
    """Tokens of one request or several, one after the other."""
    if len(parts) == 1:
        return parts[0]
    slots = zip(*(one.slots for one in parts), strict=True)
    return Tokens(
        torch.cat([one.state for one in parts]),
        list(chain.from_iterable(one.positions for one in parts)),
        tuple(list(chain.from_iterable(group)) for group in slots),
    )


@dataclass(frozen=True)
class Bounds:
    """When pending tokens of a request have to run."""

    most: int = MAX_PENDING
    block: int | None = None
    """Tokens of a block that enters the prefix cache once it is full; None: no such cache."""


class PendingTokens:
    """The pending tokens of one request, by the exit layer at which they wait.

    Who waits at a lower layer has a later position: a token that goes beyond a layer takes along
    all that wait there.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._waiting: dict[int, list[Tokens]] = {}
        self._first = self._next = 0
        """Positions of the first pending token, and after the last."""
        self._since = 0
        """The number of the pass after which the last one began to wait."""

    def __len__(self) -> int:
        return sum(len(some) for kept in self._waiting.values() for some in kept)

    def must_run(self, position: int) -> bool:
        """Whether the token at `position`, which might wait, has to run now with all others."""
        ends_block = self._bounds.block is not None and (position + 1) % self._bounds.block == 0
        return ends_block or len(self) >= self._bounds.most

    def wait(self, layer: int, tokens: Tokens, since: int = 0) -> None:
        """Leaves a request's last tokens at an exit layer, during or after pass number `since`."""
        if not self._waiting:
            self._first = tokens.positions[0]
        self._waiting.setdefault(layer, []).append(tokens)
        self._next, self._since = tokens.positions[-1] + 1, since

    def take(self, layer: int) -> Tokens | None:
        """The tokens that wait at `layer`, which go on now; None where there are none."""
        kept = self._waiting.pop(layer, None)
        return None if kept is None else joined(kept)

    def expect(self, first: int, last: int, number: int) -> None:
        """Tells which positions of the request pass `number` computes.

        Either those after the pending tokens, or, in the very next pass, the last of those
        themselves, as far as vLLM scheduled them. Else the request was preempted: it computes them
        anew, through all layers.
        """
        if not self._waiting or first == self._next:
            return
        if not self._first <= first < self._next or number != self._since + 1:
            self._waiting.clear()
        elif last < self._next - 1:
            for layer, kept in list(self._waiting.items()):
                cut = [some for some in (one.up_to(last) for one in kept) if len(some)]
                self._waiting[layer] = cut
                if not cut:
                    del self._waiting[layer]
            self._next = last + 1

    def count_from(self, position: int) -> int:
        """How many wait at or after a position; between passes, their positions have no gaps."""
        return max(0, self._next - max(position, self._first)) if self._waiting else 0

    def clear(self) -> None:
        """Forgets all: they run through all layers again."""
        self._waiting.clear()
