"""The tokens of a pass that still run, as rows leave and pending tokens come along.

Shapes: T tokens of the pass, A active tokens, N some rows, D hidden, G cache groups.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from exitserve.engine.layers.segments import Segment, Stream, total_of
from exitserve.engine.pending_tokens import PENDING, Tokens, joined


class ActiveTokens:
    """Tokens row by row, each row's in the order of their positions."""

    def __init__(
        self, lengths: Sequence[int], positions: Tensor, stream: Stream, slots: Sequence[Tensor]
    ) -> None:
        """Starts with the tokens of the pass.

        Args:
            lengths: [B] tokens of each row; a row without any may still take some along.
            positions: [T].
            stream: [T, D].
            slots: G times [T], where keys and values go in the cache.
        """
        self._places = _places({row: length for row, length in enumerate(lengths) if length})
        self._starts = list(accumulate(lengths, initial=0))
        """[B + 1] index of each row's first token in the pass."""
        self._lengths = list(lengths)
        self._all_positions = positions
        self.positions = positions
        self.stream = stream
        self.normed = stream[0][:0]
        """[A, D] normed states behind the segment that ran last, until rows go or tokens come."""
        self.slots = tuple(slots)
        self.tokens = torch.arange(positions.shape[0])
        """[A] indices in the pass, `PENDING` for tokens that come along."""
        self.num_pending = 0
        """How many of the active tokens come along."""

    @property
    def rows(self) -> list[int]:
        """[R] the rows that run, ascending."""
        return list(self._places)

    @property
    def lengths(self) -> list[int]:
        """[R] tokens of each."""
        return [len(place) for place in self._places.values()]

    def ends(self) -> Tensor:
        """[R] int32 length of each row's sequence up to its last active token."""
        return self.positions[self.last_tokens(self.rows)].int() + 1

    def run(self, segment: Segment) -> None:
        """Runs the next layers."""
        self.normed, hidden, residual = segment(self.positions, *self.stream)
        if hidden is not None:  # behind the last layer nothing goes on
            self.stream = hidden, residual

    def total(self) -> Tensor:
        """The residual stream [A, D] itself."""
        return total_of(self.stream)

    def last_tokens(self, rows: Sequence[int]) -> Tensor:
        """[N] where the last tokens of `rows` are among the active tokens."""
        return _whole([self._places[row].stop - 1 for row in rows])

    def tokens_of(self, row: int, total: Tensor) -> Tokens:
        """A row's tokens, with their state cut from `total` [A, D]."""
        place = slice(self._places[row].start, self._places[row].stop)
        slots = tuple(group[place].clone() for group in self.slots)
        return Tokens(total[place].clone(), self.positions[place].clone(), slots)

    def put_off(self, counts: Mapping[int, int]) -> None:
        """Drops the first tokens of some rows, as many as `counts` says: they come later."""
        kept = {row: place[counts.get(row, 0) :] for row, place in self._places.items()}
        self._places = _places({row: len(place) for row, place in kept.items() if place})
        self._arrange(_whole([token for place in kept.values() for token in place]))

    def change(self, gone: Collection[int], taken: Mapping[int, Tokens]) -> None:
        """Lets rows go, and puts tokens before those of the rows that take them along."""
        rows = sorted({*self._places, *taken} - set(gone))
        behind = _places({row: len(taken[row]) for row in sorted(taken)}, self.positions.shape[0])
        nothing = range(0)
        order = [
            token
            for row in rows
            for token in (*behind.get(row, nothing), *self._places.get(row, nothing))
        ]
        self._places = _places(
            {r: len(behind.get(r, nothing)) + len(self._places.get(r, nothing)) for r in rows}
        )
        parts = [taken[row] for row in behind]
        if not parts:
            self._arrange(_whole(order))
            return
        indices = [self._indices(row, taken[row]) for row in behind]
        self._arrange(_whole(order), joined(parts), torch.cat(indices))

    def _indices(self, row: int, tokens: Tokens) -> Tensor:
        """[K] where a row's tokens are in the pass."""
        if not self._lengths[row]:
            return torch.full_like(tokens.positions, PENDING)
        start = self._starts[row]
        return tokens.indices(int(self._all_positions[start]), start)

    def _arrange(
        self, order: Tensor, more: Tokens | None = None, indices: Tensor | None = None
    ) -> None:
        """Puts `more` behind the active tokens, then takes those in `order`.

        Args:
            order: [A] which to take.
            more: tokens that join.
            indices: where they are in the pass.
        """
        (hidden, residual), tokens, slots = self.stream, self.tokens, self.slots
        if more is not None and indices is not None:
            first = more.state if residual is None else torch.zeros_like(more.state)
            hidden = torch.cat([hidden, first])
            residual = None if residual is None else torch.cat([residual, more.state])
            self.positions = torch.cat([self.positions, more.positions])
            tokens = torch.cat([tokens, indices])
            slots = tuple(map(torch.cat, zip(slots, more.slots, strict=True)))
        self.stream = hidden[order], None if residual is None else residual[order]
        self.positions = self.positions[order]
        self.tokens = tokens[order]
        self.num_pending = int((self.tokens == PENDING).sum())
        self.slots = tuple(group[order] for group in slots)

    def hand_over(self, left: Tensor) -> Tensor:
        """Normed states of the whole pass [T, D].

        Args:
            left: [T, D] of those that left before; filled up with the active tokens'.
        """
        normed = self.normed
        if normed.shape == left.shape and not self.num_pending:
            return normed  # every token is still there
        if self.num_pending:
            own = self.tokens != PENDING
            return left.index_copy_(0, self.tokens[own], normed[own])
        return left.index_copy_(0, self.tokens, normed)


def _places(lengths: Mapping[int, int], start: int = 0) -> dict[int, range]:
    """Where each row's tokens are when rows follow each other from `start` on."""
    ends = accumulate(lengths.values(), initial=start)
    return {row: range(a, b) for row, (a, b) in zip(lengths, pairwise(ends), strict=True)}


def _whole(numbers: list[int]) -> Tensor:
    """Whole numbers, also where there are none."""
    return torch.tensor(numbers, dtype=torch.long)
