"""Decides which exit checks are worth making, from the earlier checks of the same request.

A check that fails costs a pass through the LM head, as much as several layers on models with a
large vocabulary. So a request keeps a running success rate of its checks at each exit layer. While
that rate is below the layer's break-even, it waits longer and longer between checks; a success ends
the waiting. No token exits without a check that passed.

Because only the request's earlier checks at the same layer count, its tokens do not depend on the
rest of the batch, and the oracle can follow the same rule in one parallel pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MEMORY = 8
"""The running rate is averaged over about this many checks."""
LONGEST_WAIT = 32
"""In tokens: each then costs about 1/32 of a check, and longer waits would save little more."""


def first_rate(break_even: float) -> float:
    """The success rate with which a new request begins: twice the break-even.

    So it makes a few checks before it begins to wait.
    """
    return min(2.0 * break_even, 1.0)


@dataclass
class _LayerRecord:
    """Success rate and wait of one request at one exit layer."""

    break_even: float
    rate: float
    wait: int = 0
    """Tokens to leave unchecked before the next check."""
    next_wait: int = 1

    def record(self, passed: bool) -> None:
        self.rate += (float(passed) - self.rate) / MEMORY
        if passed or self.rate >= self.break_even:
            self.wait, self.next_wait = 0, 1
        else:
            self.wait, self.next_wait = self.next_wait, min(2 * self.next_wait, LONGEST_WAIT)


class CheckSchedule:
    """Decides, token by token, whether to check a request at an exit layer."""

    def __init__(self, break_even: Mapping[int, float]) -> None:
        """Starts a request.

        Args:
            break_even: for each exit layer, the success rate from which a check pays
                (`exitserve.costs.break_even`). Layers left out are checked at every token.
        """
        self._records = {
            layer: _LayerRecord(break_even=rate, rate=first_rate(rate))
            for layer, rate in break_even.items()
        }

    def is_waiting(self, layer: int) -> bool:
        """Whether the next token that arrives at `layer` goes unchecked."""
        record = self._records.get(layer)
        return record is not None and record.wait > 0

    def skip(self, layer: int) -> None:
        """Notes that a token passed `layer` unchecked, as `is_waiting` asked for."""
        self._records[layer].wait -= 1

    def record(self, layer: int, passed: bool) -> None:
        """Notes the outcome of a check that was made."""
        if record := self._records.get(layer):
            record.record(passed)
