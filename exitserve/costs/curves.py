"""Seconds that the parts of a decode step take, as functions of the number of rows. Pure Python."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from exitserve.costs.byte_costs import TokenCosts


@dataclass(frozen=True)
class Curve:
    """Seconds as a function of the number of rows: linear between points, 0 for no rows.

    Beyond the last point it goes on as between the last two: so many rows are bound by arithmetic.
    """

    points: tuple[tuple[int, float], ...]
    """(rows, seconds), rows ascending from 1."""

    def __call__(self, rows: float) -> float:
        """Seconds for a number of rows, none or more; of batches that vary, their mean."""
        if rows == 0:
            return 0.0
        where = bisect_left(self.points, (rows, 0.0))
        if where < len(self.points) and self.points[where][0] == rows:
            return self.points[where][1]
        if len(self.points) == 1:
            return self.points[0][1] * rows / self.points[0][0]
        where = min(max(where, 1), len(self.points) - 1)
        (fewer, below), (more, above) = self.points[where - 1 : where + 1]
        return below + (above - below) * (rows - fewer) / (more - fewer)


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds that the parts of a decode step take, by the number of rows."""

    num_layers: int
    """L."""
    matrices: Curve
    """One layer but for attention: norms and products with its weights."""
    attention: Curve
    """One layer's attention: the cache it reads."""
    fill: Curve
    """Keys and values of one layer, for rows that do not run it."""
    check: Curve
    """One exit check: norm, exit rows of the head, confidence. A draft reads the same rows."""
    head: Curve
    """Norm and head at full depth."""
    rest: Curve
    """What every step costs: scheduling, preparing the batch, sampling."""
    exits: Curve
    """What exits add to a step in which rows may exit: planning and recording."""

    def layer(self, rows: int) -> float:
        """Seconds of one layer."""
        return self.matrices(rows) + self.attention(rows)

    def full(self, batch: int) -> float:
        """Seconds of a step of `batch` rows at full depth, without exits."""
        return self.rest(batch) + self.num_layers * self.layer(batch) + self.head(batch)

    def check_in_layers(self, batch: int) -> float:
        """What a check costs, as a number of layers."""
        return self.check(batch) / self.layer(batch)

    def of_tokens(self, batch: int) -> TokenCosts:
        """What one token costs in a batch whose rows all do the same."""
        return TokenCosts(
            num_layers=self.num_layers,
            layer=self.layer(batch) / batch,
            fill=self.fill(batch) / batch,
            check=self.check(batch) / batch,
            head=self.head(batch) / batch,
            rest=(self.rest(batch) + self.exits(batch)) / batch,
        )
