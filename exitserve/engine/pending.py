"""Mode "defer": tokens that were emitted, and whose deeper layers are still to run.

A token that exits in this mode leaves its state at the exit layer behind. The next token of its
request that goes on beyond that layer takes it along: several positions of one row run the deeper
layers in one pass, which costs little more than one where decoding is bound by reading weights.
So all keys and values are those of full depth, and the tokens before a token have been through
every layer that it goes through itself.

Shapes: K pending tokens, D hidden, G cache groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_PENDING = 16
"""Tokens of a request that may be pending; one more, and all run their deeper layers."""


@dataclass(frozen=True)
class Tokens:
    """Some consecutive tokens of one request, in the midst of the layers."""

    state: Tensor
    """[K, D] residual stream."""
    positions: Tensor
    """[K]."""
    slots: tuple[Tensor, ...]
    """G times [K]: where their keys and values go in the cache."""

    def __len__(self) -> int:
        return self.positions.shape[0]


def joined(parts: Sequence[Tokens]) -> Tokens:
    """Tokens of one request or several, one after the other."""
    if len(parts) == 1:
        return parts[0]
    slots = zip(*(one.slots for one in parts), strict=True)
    return Tokens(
        torch.cat([one.state for one in parts]),
        torch.cat([one.positions for one in parts]),
        tuple(torch.cat(group) for group in slots),
    )


@dataclass(frozen=True)
class Bounds:
    """When pending tokens of a request have to run."""

    most: int = MAX_PENDING
    block: int | None = None
    """Tokens of a block that enters the prefix cache once it is full; None: no such cache."""


class Pending:
    """The pending tokens of one request, by the exit layer at which they wait.

    Who waits at a lower layer has a later position: a token that goes beyond a layer takes along
    all that wait there.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._waiting: dict[int, list[Tokens]] = {}
        self._next: int | None = None
        """The position after the last pending token's."""

    def __len__(self) -> int:
        return sum(len(some) for kept in self._waiting.values() for some in kept)

    def must_run(self, position: int) -> bool:
        """Whether the token at `position`, which might wait, has to run now with all others."""
        ends_block = self._bounds.block is not None and (position + 1) % self._bounds.block == 0
        return ends_block or len(self) >= self._bounds.most

    def wait(self, layer: int, tokens: Tokens, next_position: int) -> None:
        """Leaves tokens at an exit layer; `next_position` is that of the next token to come."""
        self._waiting.setdefault(layer, []).append(tokens)
        self._next = next_position

    def take(self, layer: int) -> Tokens | None:
        """The tokens that wait at `layer`, which go on now; None where there are none."""
        kept = self._waiting.pop(layer, None)
        return None if kept is None else joined(kept)

    def expect(self, position: int) -> None:
        """Tells where the request's next pass starts.

        Not after the last pending token: the request was preempted, and computes those tokens
        anew, through all layers.
        """
        if self._waiting and position != self._next:
            self._waiting.clear()
