"""Outcomes of drafting (mode "defer"), without the oracle.

Keys and values are exact there, so no token's exit changes what a later token sees. One full-depth
pass over a piece tells what any threshold gives: which tokens are final at the draft layer, and
what it says of the others.

Shapes: P pieces, N tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from exitserve.calibration.outcomes import Outcome
from exitserve.calibration.scores import ExitScores, PieceReading, all_scores
from exitserve.policy import ExitPolicy
from exitserve.reference import Reference


class ExactOutcomes:
    """What any policy of mode "defer" gives on some pieces, all at once."""

    def __init__(self, readings: Sequence[PieceReading]) -> None:
        self.pieces = [one.piece for one in readings]
        self._scores = all_scores(readings)
        counts = [len(one.piece.token_ids) - one.piece.prompt_length for one in readings]
        self._counts = torch.tensor(counts, dtype=torch.float64)
        self._piece = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        depths = readings[0].nats if readings else {}
        # The last token of a piece has none that follows: its nats are left out of the mean.
        self._nats = {
            depth: torch.cat([pad(one.nats[depth], (0, 1)) for one in readings]) for depth in depths
        }

    def of(self, oracle: Reference, policy: ExitPolicy) -> list[Outcome]:
        """[P] what `exitserve.calibration.outcomes.measure_outcome` finds.

        Args:
            oracle: with the criterion that is served.
            policy: of mode "defer", with a threshold at one layer.
        """
        full, ((layer, *_),) = oracle.parts.num_layers, policy.by_layer
        scores = self._scores[layer]
        leaves = _passes(oracle, layer, scores, policy)
        nats = torch.where(leaves, self._nats[layer], self._nats[full])
        followed = (self._counts - 1.0).clamp(min=1.0)
        columns = {
            "agreement": self._sums(scores.agrees | ~leaves) / self._counts,
            "depth": self._sums(torch.where(leaves, layer, full)) / self._counts,
            "checks": self._sums(torch.ones_like(leaves)) / self._counts,
            "stays": self._sums(~leaves) / self._counts,
            "nats": self._sums(nats) / followed,
            "full_nats": self._sums(self._nats[full]) / followed,
            "accepted": self._sums(leaves | scores.agrees) / self._counts,
        }
        means = zip(*(column.tolist() for column in columns.values()), strict=True)
        early_ends = leaves & scores.ends
        ends = self._sums(early_ends).long().tolist()
        wrong = self._sums(early_ends & ~scores.agrees).long().tolist()
        return [
            Outcome(
                source=piece.source,
                tokens=int(count),
                ends=ends[index],
                wrong_ends=wrong[index],
                **dict(zip(columns, own, strict=True)),
            )
            for index, (piece, count, own) in enumerate(
                zip(self.pieces, self._counts.tolist(), means, strict=True)
            )
        ]

    def _sums(self, values: Tensor) -> Tensor:
        """[P] float64 sums of values [N] over each piece."""
        return torch.zeros_like(self._counts).index_add_(0, self._piece, values.double())


def _passes(oracle: Reference, layer: int, scores: ExitScores, policy: ExitPolicy) -> Tensor:
    """[N] bool: tokens whose confidence is above the threshold, that of ends for ends."""
    threshold, end_threshold = policy.thresholds_at(layer)
    limit = torch.where(scores.ends, end_threshold, threshold)
    return scores.confidence[oracle.criterion] > limit
