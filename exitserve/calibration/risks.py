"""The target of a calibration: the risk of a piece of text, from 0 to 1, and the limit of its mean.

Risks belong to pieces of text, not to tokens: pieces are independent, tokens of one piece are not.
"""

from __future__ import annotations

from dataclasses import dataclass

from exitserve.calibration.outcomes import Outcome
from exitserve.errors import ExitServeError


@dataclass(frozen=True)
class Target:
    """The share of tokens that must be full depth's."""

    agreement: float

    @property
    def name(self) -> str:
        """As in the checkpoint, such as `agreement>=0.99`."""
        return f"agreement>={self.agreement:g}"

    @property
    def limit(self) -> float:
        """The mean risk must be at most this."""
        return 1.0 - self.agreement

    def risk(self, one: Outcome) -> float:
        """Mean over the tokens of one piece, from 0 to 1."""
        return 1.0 - one.agreement


def agreement_target(least: float) -> Target:
    """At least this share of tokens is full depth's."""
    if not 0.0 < least < 1.0:
        raise ExitServeError(
            f"--target-agreement must be above 0 and below 1, such as 0.99, not {least:g}."
        )
    return Target(least)


def wrong_ends(one: Outcome) -> float | None:
    """Share of a piece's early ends of sequence that are wrong; None where it has none."""
    return one.wrong_ends / one.ends if one.ends else None
