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
        self,
        lengths: Sequence[int],
        positions: Sequence[int],
        stream: Stream,
        slots: Sequence[Sequence[int]],
        at: Tensor | None = None,
    ) -> None:
        """Starts with the tokens of the pass.

        What is known of tokens beside their states are numbers of Python's: few tokens run, and
        each call of a tensor's costs as much as hundreds of numbers.

        Args:
            lengths: [B] tokens of each row; a row without any may still take some along.
            positions: [T].
            stream: [T, D].
            slots: G times [T], where keys and values go in the cache.
            at: [T] the positions as a tensor, if there is one.
        """
        self._places = _places({row: length for row, length in enumerate(lengths) if length})
        self._starts = list(accumulate(lengths, initial=0))
        """[B + 1] index of each row's first token in the pass."""
        self._lengths = list(lengths)
        self._all_positions = positions
        self._positions = list(positions)
        self.positions = torch.tensor(self._positions, dtype=torch.long) if at is None else at
        """[A], as layers take them."""
        self.stream = stream
        self.normed = stream[0][:0]
        """[A, D] normed states behind the segment that ran last, until rows go or tokens come."""
        self.scores: Tensor | None = None
        """[A] of that segment's screen, if it has one."""
        self.slots = [list(group) for group in slots]
        """G times [A]."""
        self._unwanted: Mapping[int, int] = {}
        self.tokens = list(range(len(positions)))
        """[A] indices in the pass, `PENDING` for tokens that come along."""
        self.num_layers = 0
        """Those that they have run."""

    @property
    def num_pending(self) -> int:
        """How many of the active tokens come along."""
        return self.tokens.count(PENDING)

    @property
    def rows(self) -> list[int]:
        """[R] the rows that run, ascending."""
        return list(self._places)

    @property
    def lengths(self) -> list[int]:
        """[R] tokens of each."""
        return [len(place) for place in self._places.values()]

    def ends(self) -> list[int]:
        """[R] length of each row's sequence up to its last active token."""
        return [self._positions[place.stop - 1] + 1 for place in self._places.values()]

    def run(self, segment: Segment) -> None:
        """Runs the next layers."""
        self.normed, self.scores, hidden, residual = segment(self.positions, *self.stream)
        self.num_layers = segment.end
        if hidden is not None:  # behind the last layer nothing goes on
            self.stream = hidden, residual

    def total(self) -> Tensor:
        """The residual stream [A, D] itself."""
        return total_of(self.stream)

    def last_tokens(self, rows: Sequence[int]) -> list[int]:
        """[N] where the last tokens of `rows` are among the active tokens."""
        return [self._places[row].stop - 1 for row in rows]

    def last_normed(self) -> Tensor:
        """[R, D] normed states of the rows' last tokens, behind the segment that ran last."""
        return taken(self.normed, self.last_tokens(self.rows))

    def tokens_of(self, row: int, total: Tensor) -> Tokens:
        """A row's tokens, with their state cut from `total` [A, D]."""
        place = slice(self._places[row].start, self._places[row].stop)
        slots = tuple(group[place] for group in self.slots)
        # A copy, so that the others' states do not stay with it.
        state = total if len(self._places) == 1 else total[place].clone()
        return Tokens(state, self._positions[place], slots)

    def put_off(self, counts: Mapping[int, int], decided: Mapping[int, int]) -> None:
        """Drops the first tokens of some rows, as many as `counts` says: they come later.

        Args:
            counts: by row.
            decided: by row, how many of these only come along: nobody wants their states.
        """
        self._unwanted = decided
        kept = {row: place[counts.get(row, 0) :] for row, place in self._places.items()}
        self._places = _places({row: len(place) for row, place in kept.items() if place})
        self._arrange([token for place in kept.values() for token in place])

    def change(self, gone: Collection[int], taken: Mapping[int, Tokens]) -> None:
        """Lets rows go, and puts tokens before those of the rows that take them along."""
        rows = sorted({*self._places, *taken} - set(gone))
        if not rows:
            self._places = {}
            return
        before = _places({row: len(taken[row]) for row in sorted(taken)})
        count, nothing = sum(len(place) for place in before.values()), range(0)
        own = {row: range(a.start + count, a.stop + count) for row, a in self._places.items()}
        order = [
            token for row in rows for token in (*before.get(row, nothing), *own.get(row, nothing))
        ]
        self._places = _places(
            {r: len(before.get(r, nothing)) + len(own.get(r, nothing)) for r in rows}
        )
        come = [one for row in before for one in self._indices(row, taken[row])]
        self.tokens = come + self.tokens
        self._arrange(order, [taken[row] for row in before])

    def _indices(self, row: int, tokens: Tokens) -> list[int]:
        """[K] where a row's tokens are in the pass."""
        if not self._lengths[row]:
            return [PENDING] * len(tokens)
        start, past = self._starts[row], self._unwanted.get(row, 0)
        return tokens.indices(self._all_positions[start] + past, start + past)

    def _arrange(self, order: Sequence[int], parts: Sequence[Tokens] = ()) -> None:
        """Puts `parts` before the active tokens, then takes those in `order` [A]."""
        hidden, residual = self.stream
        if parts:
            more = joined(parts)
            first = more.state if residual is None else torch.zeros_like(more.state)
            hidden = torch.cat([first, hidden])
            residual = None if residual is None else torch.cat([more.state, residual])
            self._positions = [*more.positions, *self._positions]
            groups = zip(more.slots, self.slots, strict=True)
            self.slots = [[*others, *group] for others, group in groups]
        if order != list(range(len(self._positions))):
            taken = torch.tensor(order, dtype=torch.long)
            hidden, residual = hidden[taken], None if residual is None else residual[taken]
            self._positions = [self._positions[one] for one in order]
            self.tokens = [self.tokens[one] for one in order]
            self.slots = [[group[one] for one in order] for group in self.slots]
        self.stream = hidden, residual
        self.positions = torch.tensor(self._positions, dtype=torch.long)

    def hand_over(self, left: Tensor) -> Tensor:
        """Normed states of the whole pass [T, D].

        Args:
            left: [T, D] of those that left before; filled up with the active tokens'.
        """
        normed = self.normed
        own = [place for place, token in enumerate(self.tokens) if token != PENDING]
        if len(own) < len(self.tokens):
            normed = normed[own]
        elif normed.shape == left.shape:
            return normed  # every token is still there
        places = torch.tensor([self.tokens[one] for one in own], dtype=torch.long)
        return left.index_copy_(0, places, normed)


def taken(states: Tensor, places: Sequence[int]) -> Tensor:
    """Some states [N, D], in ascending order; where they are next to each other, not copied."""
    first, last = places[0], places[-1] + 1
    if len(places) == len(states):
        return states
    if last - first == len(places):
        return states[first:last]
    return states[torch.tensor(places)]


def _places(lengths: Mapping[int, int], start: int = 0) -> dict[int, range]:
    """Where each row's tokens are when rows follow each other from `start` on."""
    ends = accumulate(lengths.values(), initial=start)
    return {row: range(a, b) for row, (a, b) in zip(lengths, pairwise(ends), strict=True)}
