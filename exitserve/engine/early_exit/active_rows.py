"""The rows of a pass that still run, as others leave.

Shapes: T tokens of the pass, A tokens that run, R rows that run, N some rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from exitserve.engine.layers.segments import Segment, Stream


class ActiveRows:
    """Rows in ascending order, each with all its tokens of the pass."""

    def __init__(self, lengths: Sequence[int], positions: Tensor, hidden: Tensor) -> None:
        """Starts with all rows.

        Args:
            lengths: [B] tokens of each.
            positions: [T].
            hidden: [T, D] embedded tokens.
        """
        self.rows, self.lengths = list(range(len(lengths))), list(lengths)
        self.positions = positions
        """[A]."""
        self.stream: Stream = (hidden, None)
        """[A, D]."""
        self.normed = hidden
        """[A, D] normed states behind the segment that ran last."""
        self.tokens = torch.arange(len(positions))
        """[A] where they are in the pass."""

    def run(self, segment: Segment) -> None:
        """Runs the next layers."""
        self.normed, hidden, residual = segment(self.positions, *self.stream)
        if hidden is not None:  # behind the last layer nothing goes on
            self.stream = hidden, residual

    def last_tokens(self, rows: Sequence[int]) -> list[int]:
        """[N] where the last tokens of `rows` are among those that run."""
        ends = dict(zip(self.rows, accumulate(self.lengths), strict=True))
        return [ends[row] - 1 for row in rows]

    def leave(self, gone: Collection[int]) -> None:
        """Lets rows go."""
        stays = [row not in gone for row in self.rows]
        kept = torch.tensor(stays).repeat_interleave(torch.tensor(self.lengths)).nonzero()[:, 0]
        self.lengths = [one for one, stay in zip(self.lengths, stays, strict=True) if stay]
        self.rows = [row for row, stay in zip(self.rows, stays, strict=True) if stay]
        hidden, residual = self.stream
        self.stream = hidden[kept], None if residual is None else residual[kept]
        self.tokens, self.positions = self.tokens[kept], self.positions[kept]
