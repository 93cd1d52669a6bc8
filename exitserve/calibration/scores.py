"""Confidence and agreement at every exit layer, for tokens that ran at full depth.

One full-depth pass over a piece shows all exits at once, with exact keys and values. Proposals are
made from that, and where keys and values stay exact it tells all that thresholds give (`exact`).
Elsewhere the oracle measures that (`outcomes`).

Shapes: N tokens, E exit layers, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exitserve.agreement import exit_states, following_nats
from exitserve.calibration.outcomes import Piece
from exitserve.reference import Reference
from exitserve_kernels.exit_check import CRITERIA


@dataclass(frozen=True)
class ExitScores:
    """What one exit layer predicts for N tokens."""

    confidence: Mapping[str, Tensor]
    """[N] float32 for each criterion."""
    agrees: Tensor
    """[N] bool: its greedy token is full depth's."""
    ends: Tensor
    """[N] bool: its greedy token ends the sequence."""


@dataclass(frozen=True)
class PieceReading:
    """What every exit predicts for the decode tokens of one piece, at full depth's states."""

    piece: Piece
    scores: Mapping[int, ExitScores]
    """By exit layer."""
    nats: Mapping[int, Tensor]
    """[N - 1] negative log-likelihood of the tokens that follow, by exit layer and full depth."""

    def plain(self) -> dict[str, Any]:
        """Tensors and dicts, without the piece."""
        scores = {layer: vars(one) for layer, one in self.scores.items()}
        return {"scores": scores, "nats": dict(self.nats)}

    @classmethod
    def of_plain(cls, piece: Piece, plain: Mapping[str, Any]) -> PieceReading:
        """The reading of a piece from its `plain` form."""
        scores = {layer: ExitScores(**one) for layer, one in plain["scores"].items()}
        return cls(piece, scores, plain["nats"])


@torch.no_grad()
def read_exits(reference: Reference, piece: Piece) -> PieceReading:
    """Reads a piece by the oracle, in one full-depth pass."""
    states, final = exit_states(reference, piece.token_ids, piece.prompt_length)
    full, parts = reference.parts.num_layers, reference.parts
    last = parts.classify_normed(final)
    token = last.argmax(dim=-1)
    following = (piece.token_ids, piece.prompt_length)
    nats = {full: following_nats(last, *following).cpu()}
    scores = {}
    for layer, normed in states.items():
        logits = parts.classify_normed(normed)
        never = torch.full((len(logits),), torch.inf, device=logits.device)
        found = {str(one): reference.check(logits, never, never, one) for one in CRITERIA}
        greedy = reference.exit_tokens(logits)
        nats[layer] = following_nats(logits, *following).cpu()
        scores[layer] = ExitScores(
            {name: one.confidence.cpu() for name, one in found.items()},
            (greedy == token).cpu(),
            torch.isin(greedy, reference.eos_token_ids).cpu(),
        )
    return PieceReading(piece, scores, nats)


def all_scores(readings: Sequence[PieceReading]) -> dict[int, ExitScores]:
    """The scores of all decode tokens of several pieces, by exit layer."""
    layers = readings[0].scores if readings else {}
    return {layer: _joined([one.scores[layer] for one in readings]) for layer in layers}


def _joined(scores: Sequence[ExitScores]) -> ExitScores:
    return ExitScores(
        {
            name: torch.cat([one.confidence[name] for one in scores])
            for name in scores[0].confidence
        },
        torch.cat([one.agrees for one in scores]),
        torch.cat([one.ends for one in scores]),
    )
