"""Targets of a calibration: the risk of a piece of text, from 0 to 1, and the limit of its mean.

Risks belong to pieces of text, not to tokens: pieces are independent, tokens of one piece are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from exitserve.calibration.outcomes import Outcome
from exitserve.errors import ExitServeError

MOST_NATS = 0.5
"""Greater changes of a piece's loss, in nats per token, count as this much."""
MOST_INCREASE = 0.5
"""Largest increase of perplexity that may be asked for: ln 1.5 is below `MOST_NATS`."""


@dataclass(frozen=True)
class Target:
    """One thing that a calibration must keep."""

    name: str
    """As in the checkpoint, such as `agreement>=0.99`."""
    agreement: float | None
    """The promised share of tokens; None for targets of another kind."""
    limit: float
    """The mean risk must be at most this."""
    risk: Callable[[Outcome], float]
    """Mean over the tokens of one piece, from 0 to 1."""
    perfect: float = 0.0
    """The least risk that is possible."""
    grows: bool = True
    """Whether the risk grows as more tokens exit; for a target of depth it falls."""

    def is_weaker_than(self, other: Target) -> bool:
        """Whether both are of agreement, and this one asks for less."""
        mine, others = self.agreement, other.agreement
        return mine is not None and others is not None and mine < others


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
            f"target_perplexity_increase must be above 0 and at most {MOST_INCREASE:g} (0.01: "
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
            f"target_mean_depth must be from 1 to below the model's {num_layers} layers, not "
            f"{most:g}."
        )
    limit = most / num_layers
    return Target(
        f"mean_depth<={most:g}", None, limit, lambda one: one.depth / num_layers, grows=False
    )


def wrong_ends(one: Outcome) -> float | None:
    """Share of a piece's early ends of sequence that are wrong; None where it has none."""
    return one.wrong_ends / one.ends if one.ends else None
