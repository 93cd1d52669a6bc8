"""Tokens that wait at an exit layer for their deeper layers to run.

A token that exits in mode "defer" leaves its state at the exit layer behind. The next token of its
request that goes on beyond that layer takes it along: several positions of one row run the deeper
layers in one pass, which costs little more than one where decoding is bound by reading weights.
So all keys and values are those of full depth, and the tokens before a token have been through
every layer that it goes through itself.

The same happens while tokens are drafted, and the pass that vLLM schedules them with continues each
of its tokens from the layer where it waits. Of some nothing is left to run: they and all before
them went through all layers, or, in mode "confidence", they froze.

Shapes: K pending tokens, D hidden, G cache groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

MAX_PENDING = 16
"""Tokens of a request that may be pending in a pass; one more, and all run their deeper layers.
Drafted ones may wait beside them until their pass."""


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

    def __init__(self, bounds: Bounds, *, freezes: bool = False) -> None:
        """Starts without any.

        Args:
            bounds: when they have to run.
            freezes: whether tokens that exit freeze, so that only a drafted one waits: the last,
                which did not exit.
        """
        self._bounds, self.freezes = bounds, freezes
        self._waiting: dict[int, list[Tokens]] = {}
        self._complete = 0
        self._to_fill: dict[int, list[Tokens]] = {}
        """Tokens that froze, and whose keys and values are not propagated yet."""
        self._next = 0
        """The position after the last of all these tokens."""
        self._since = 0
        """The number of the pass after which the last one began to wait."""

    def __len__(self) -> int:
        return sum(len(some) for kept in self._waiting.values() for some in kept)

    @property
    def is_empty(self) -> bool:
        """Whether no token waits, and none is complete ahead of its pass."""
        return not self._waiting and not self._complete

    @property
    def last_layer(self) -> int:
        """The exit layer at which the last token waits; 0 where none does."""
        return min(self._waiting, default=0)

    @property
    def complete(self) -> int:
        """How many of the next pass's tokens, its first ones, need nothing of it any more: they
        froze, or ran all layers."""
        return self._complete

    @property
    def _first(self) -> int:
        """Position of the first of all these tokens."""
        return self._next - self._complete - len(self)

    def must_run(self, last: int, more: int) -> bool:
        """Whether tokens of a pass that might wait have to run on, with all that do.

        Args:
            last: position of the last of them.
            more: how many they are.
        """
        count, size = len(self) + more, self._bounds.block
        if count > self._bounds.most:
            return True
        return size is not None and (last + 1) // size > (last + 1 - count) // size

    def wait(self, layer: int, tokens: Tokens, since: int = 0) -> None:
        """Leaves a request's last tokens at an exit layer, during or after pass number `since`."""
        self._waiting.setdefault(layer, []).append(tokens)
        self._next, self._since = tokens.positions[-1] + 1, since

    def freeze(self, layer: int, tokens: Tokens, since: int) -> None:
        """Leaves a request's last tokens, which freeze at an exit layer, to `take_frozen`."""
        self._to_fill.setdefault(layer, []).append(tokens)
        self._complete += len(tokens)
        self._next, self._since = tokens.positions[-1] + 1, since

    def finish(self, last: int, complete: int, since: int) -> None:
        """Notes that all tokens up to position `last` have run all layers, after pass number
        `since`; `complete` of the next pass's are done with."""
        self._complete, self._next, self._since = complete, last + 1, since

    def pass_over(self) -> None:
        """Notes that the next pass is this one: those that were complete are its past."""
        self._complete = 0

    def take_frozen(self, layer: int) -> Tokens | None:
        """The tokens that froze at `layer` since the last call; None where there are none."""
        kept = self._to_fill.pop(layer, None)
        return None if kept is None else joined(kept)

    def take(self, layer: int) -> Tokens | None:
        """The tokens that wait at `layer`, which go on now; None where there are none."""
        kept = self._waiting.pop(layer, None)
        return None if kept is None else joined(kept)

    def expect(self, first: int, last: int, number: int, drafts: int = 0) -> None:
        """Tells which positions of the request pass `number` computes.

        Either those after the pending tokens, or the last of those themselves, as far as vLLM
        scheduled them: in the very next pass, or later if there was no room. Else the request was
        preempted, and computes them anew, through all layers; then vLLM has dropped its drafts.

        Args:
            first: position of the first.
            last: position of the last.
            number: of the pass.
            drafts: how many of the last ones are drafts.
        """
        if self.is_empty or first == self._next:
            self._complete = 0
            return
        anew = first == self._first and number != self._since + 1 and not drafts
        if anew or not self._first <= first < self._next:
            self.clear()
        elif last < self._next - 1:
            known = last + 1 - self._first
            self._cut(last)
            self._complete = known - len(self)

    def restart(self, first: int) -> None:
        """Forgets the tokens at position `first` and behind it, which run anew."""
        self._cut(first - 1)
        self._to_fill.clear()
        self._complete = 0

    def _cut(self, last: int) -> None:
        """Forgets what waits behind position `last`."""
        for layer, kept in list(self._waiting.items()):
            cut = [some for some in (one.up_to(last) for one in kept) if len(some)]
            self._waiting[layer] = cut
            if not cut:
                del self._waiting[layer]
        self._next = last + 1

    def count_from(self, position: int) -> int:
        """How many wait, or are complete, at or after a position; between passes, their positions
        have no gaps."""
        return 0 if self.is_empty else max(0, self._next - max(position, self._first))

    def clear(self) -> None:
        """Forgets all: they run through all layers again."""
        self._waiting.clear()
        self._to_fill.clear()
        self._complete = 0
