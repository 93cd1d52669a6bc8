"""What may be lost, as a number from 0 to 1 for each piece of text, and how much of it is allowed.

Independent units are pieces of text, not tokens: tokens of one piece depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from exitserve.calibration.outcomes import Outcome
from exitserve.errors import ExitServeError

MOST_NATS = 0.5
"""A piece whose loss in nats per token changes by more counts as if it changed by this much."""
MOST_INCREASE = 0.5
"""The most increase of perplexity that may be asked for: ln 1.5 is below `MOST_NATS`."""


@dataclass(frozen=True)
class Target:
    """One thing that a calibration must keep."""

    name: str
    """In words, as in the checkpoint."""
    agreement: float | None
    """The promise, where it is one about agreement."""
    limit: float
    """Of the mean risk."""
    risk: Callable[[Outcome], float]
    """Mean over the tokens of one piece, from 0 to 1."""
    perfect: float = 0.0
    """The risk of full depth; of a target of depth, of no depth at all."""
    grows: bool = True
    """Whether it grows as more tokens exit; the opposite for a target of depth."""


def agreement_target(least: float) -> Target:
    """At least this share of tokens is full depth's."""
    if not 0.0 < least < 1.0:
        raise ExitServeError(
            f"--target-agreement must be above 0 and below 1, such as 0.99, not {least:g}."
        )
    return Target(f"agreement>={least:g}", least, 1.0 - least, lambda one: 1.0 - one.agreement)


def perplexity_target(increase: float) -> Target:
    """Perplexity rises by at most this share: 0.01 is one per cent; see `MOST_NATS`."""
    if not 0.0 < increase <= MOST_INCREASE:
        raise ExitServeError(
            f"--target-perplexity-increase must be above 0 and at most {MOST_INCREASE:g} (0.01: "
            f"one per cent), not {increase:g}."
        )

    def share(nats: float) -> float:
        return (max(-MOST_NATS, min(MOST_NATS, nats)) + MOST_NATS) / (2.0 * MOST_NATS)

    def risk(one: Outcome) -> float:
        return share(one.nats - one.full_nats)

    name = f"perplexity<=+{100 * increase:g}%"
    return Target(name, None, share(math.log1p(increase)), risk, perfect=share(0.0))


def depth_target(most: float, num_layers: int) -> Target:
    """Tokens run at most this many layers on average."""
    if not 1.0 <= most < num_layers:
        raise ExitServeError(
            f"--target-mean-depth must be from 1 to below the model's {num_layers} layers, not "
            f"{most:g}."
        )
    limit = most / num_layers
    return Target(
        f"mean_depth<={most:g}", None, limit, lambda one: one.depth / num_layers, grows=False
    )


def wrong_ends(one: Outcome) -> float | None:
    """Of the early ends of sequence in a piece, the share that full depth does not agree with."""
    return one.wrong_ends / one.ends if one.ends else None
