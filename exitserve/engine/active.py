"""The tokens of a pass that still run, as rows leave and pending tokens come along.

Shapes: T tokens of the pass, A active tokens, N some rows, D hidden, G cache groups.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from exitserve.engine.compiled import Stream
from exitserve.engine.pending import Tokens, joined

PENDING = -1


class Active:
    """Tokens row by row, each row's in the order of their positions."""

    def __init__(
        self, lengths: Sequence[int], positions: Tensor, stream: Stream, slots: Sequence[Tensor]
    ) -> None:
        """Starts with the tokens of the pass.

        Args:
            lengths: [B] tokens of each row.
            positions: [T].
            stream: [T, D].
            slots: G times [T], where keys and values go in the cache.
        """
        self.rows = list(range(len(lengths)))
        self.lengths = list(lengths)
        self.positions = positions
        self.stream = stream
        self.slots = tuple(slots)
        self.tokens = torch.arange(positions.shape[0])
        """[A] indices in the pass, `PENDING` for tokens that come along."""
        self.num_pending = 0
        self.changed = False

    def total(self) -> Tensor:
        """The residual stream [A, D] itself."""
        return total_of(self.stream)

    def last_tokens(self, rows: Sequence[int]) -> Tensor:
        """[N] where the last tokens of `rows` are among the active tokens."""
        place = dict(zip(self.rows, accumulate(self.lengths), strict=True))
        return torch.tensor([place[row] - 1 for row in rows])

    def tokens_of(self, row: int, total: Tensor) -> Tokens:
        """A row's tokens, with their state cut from `total` [A, D]."""
        index = self.rows.index(row)
        start = sum(self.lengths[:index])
        place = slice(start, start + self.lengths[index])
        slots = tuple(group[place].clone() for group in self.slots)
        return Tokens(total[place].clone(), self.positions[place].clone(), slots)

    def change(self, gone: Collection[int], taken: Mapping[int, Tokens]) -> None:
        """Lets rows go, and puts tokens before those of the rows that take them along."""
        parts = [taken[row] for row in sorted(taken)]
        fresh = self.positions.shape[0]  # where the parts begin, once they are put behind
        begins = dict(zip(sorted(taken), accumulate(map(len, parts), initial=fresh), strict=False))
        starts = accumulate(self.lengths, initial=0)
        own = {
            row: range(start, start + length)
            for row, start, length in zip(self.rows, starts, self.lengths, strict=False)
            if row not in gone
        }
        self.rows = sorted({*own, *taken})
        order, self.lengths = list[int](), []
        for row in self.rows:
            before = len(order)
            if row in taken:
                order += range(begins[row], begins[row] + len(taken[row]))
            order += own.get(row, ())
            self.lengths.append(len(order) - before)
        self._arrange(torch.tensor(order), joined(parts) if parts else None)

    def _arrange(self, order: Tensor, more: Tokens | None) -> None:
        """Puts `more` behind the active tokens, then takes those in `order`."""
        (hidden, residual), tokens, slots = self.stream, self.tokens, self.slots
        if more is not None:
            first = more.state if residual is None else torch.zeros_like(more.state)
            hidden = torch.cat([hidden, first])
            residual = None if residual is None else torch.cat([residual, more.state])
            self.positions = torch.cat([self.positions, more.positions])
            tokens = torch.cat([tokens, torch.full_like(more.positions, PENDING)])
            slots = tuple(map(torch.cat, zip(slots, more.slots, strict=True)))
        self.stream = hidden[order], None if residual is None else residual[order]
        self.positions = self.positions[order]
        self.tokens = tokens[order]
        self.slots = tuple(group[order] for group in slots)
        self.num_pending = int((self.tokens == PENDING).sum())
        self.changed = True

    def hand_over(self, normed: Tensor, left: Tensor) -> Tensor:
        """Normed states of the whole pass [T, D].

        Args:
            normed: [A, D] of the active tokens.
            left: [T, D] of those that left before; filled up.
        """
        if not self.changed:
            return normed
        if self.num_pending:
            own = self.tokens != PENDING
            return left.index_copy_(0, self.tokens[own], normed[own])
        return left.index_copy_(0, self.tokens, normed)


def total_of(stream: Stream) -> Tensor:
    """The residual stream [T, D] itself."""
    hidden, residual = stream
    return hidden if residual is None else hidden + residual
