"""Which exit checks are worth making: a request's own past decides, nothing else.

A check that fails costs a pass through the LM head, which is several layers' worth on models
with a large vocabulary. So a request keeps, for each exit layer, a running success rate of its
own checks; while that rate is below the layer's break-even, it waits longer and longer between
checks, and a success ends the waiting. Nothing ever exits without a check that passed.

Because only the request's own earlier checks at the same layer count, what a request gets does
not depend on its neighbours, and the oracle can follow the same rule in one parallel pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MEMORY = 8
"""A check's weight in the running rate fades over about this many checks."""
LONGEST_WAIT = 32
"""Tokens. A token then pays for a thirtieth of a check; waiting longer would hardly gain more."""


def first_rate(break_even: float) -> float:
    """The success rate that a new request begins with.

    Twice the break-even: it gets the benefit of the doubt for a few checks.
    """
    return min(2.0 * break_even, 1.0)


@dataclass
class _LayerRecord:
    """The checks of one request at one exit layer."""

    break_even: float
    rate: float
    wait: int = 0
    """Tokens to let pass before the next check."""
    next_wait: int = 1

    def record(self, passed: bool) -> None:
        self.rate += (float(passed) - self.rate) / MEMORY
        if passed or self.rate >= self.break_even:
            self.wait, self.next_wait = 0, 1
        else:
            self.wait, self.next_wait = self.next_wait, min(2 * self.next_wait, LONGEST_WAIT)


class CheckSchedule:
    """Decides, token by token, whether a request is checked at an exit layer."""

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
