"""Benchmarks of random weights: confidence and acceptance drawn by lot.

Random weights are never confident, and drafts from a lower layer are never what full depth says.
To time the modes all the same, an engine may be told how often checks pass and drafts are
accepted. All work is done as ever; only its outcome is replaced. No server takes these options.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from exitserve.errors import ExitServeError

Lot = tuple[int, ...]
"""What an outcome depends on: prompt, position and layer, so that repeats draw the same."""


class Forced:
    """Draws outcomes."""

    def __init__(self, shares: Mapping[str, Any]) -> None:
        """Takes `confidence` and `acceptance`, each between 0 and 1.

        Raises:
            ExitServeError: one is missing or out of range.
        """
        self.confidence, self.acceptance = (
            _share(shares, name) for name in ("confidence", "acceptance")
        )

    def passes(self, lots: Sequence[Lot]) -> list[bool]:
        """Which checks pass."""
        return [_draw("check", lot) < self.confidence for lot in lots]

    def accept(self, logits: Tensor, drafts: Sequence[int], lots: Sequence[Lot]) -> None:
        """Makes drafts the most likely tokens, except those that are not accepted.

        Args:
            logits: [K, V], those that judge each draft; changed in place.
            drafts: [K].
            lots: [K].
        """
        for own, token, lot in zip(logits, drafts, lots, strict=True):
            accepted = _draw("draft", lot) < self.acceptance
            own[token] = own.max() + 1 if accepted else own.min()


def _draw(what: str, lot: Lot) -> float:
    return random.Random(f"{what}:{lot}").random()


def _share(shares: Mapping[str, Any], name: str) -> float:
    value = shares.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ExitServeError(f"forced {name} must be a number from 0 to 1, not {value!r}.")
    return float(value)
