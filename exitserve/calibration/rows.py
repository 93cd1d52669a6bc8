"""The exit rows of a calibration (`exitserve.checkpoint.exit_rows`): which, and what others give.

Shapes: N tokens, K exit rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exitserve.agreement import exit_states
from exitserve.calibration.outcomes import Piece
from exitserve.checkpoint.exit_rows import most_frequent
from exitserve.costs.byte_costs import DecoderShape
from exitserve.reference import Reference

COMPARED = (4096, 8192, 16384)
"""Numbers of rows in the report, beside all."""
LEVELS = (0.5, 0.7)
"""Thresholds there."""
MOST_PIECES = 50
"""For the report's table."""


@dataclass(frozen=True, kw_only=True)
class RowsEntry:
    """What checks with some rows of the head give at one exit and threshold."""

    rows: int
    chosen: bool
    exit_layer: int
    threshold: float
    passes: float
    """Share of tokens whose confidence (largest probability) is above the threshold."""
    agreement: float | None
    """Share of these whose token is full depth's; None where none passes."""
    same_token: float | None
    """Share of these whose token is that of the exit's whole head."""
    layers: float
    """What a check costs, in layers, by bytes."""


def count_rows(reference: Reference, pieces: Sequence[Piece], count: int) -> Tensor:
    """[K] the most frequent tokens of some text, ascending, and all ends of sequence."""
    vocab_size = reference.model.config.get_text_config().vocab_size
    texts = [piece.token_ids for piece in pieces]
    ends = reference.eos_token_ids.tolist()
    return torch.tensor(most_frequent(texts, min(count, vocab_size), vocab_size, ends))


@torch.no_grad()
def compare_rows(
    reference: Reference, counted: Sequence[Piece], read: Sequence[Piece], shape: DecoderShape
) -> list[RowsEntry]:
    """The table of rows against exits: tokens are counted in one text and checked in another."""
    vocab_size = reference.model.config.get_text_config().vocab_size
    sizes = sorted({size for size in COMPARED if size < vocab_size} | {shape.exit_rows or 0} - {0})
    sets: list[Tensor | None] = [count_rows(reference, counted, size) for size in sizes]
    oracles = [reference.variant("max_prob", rows) for rows in (*sets, None)]
    found: dict[tuple[int, int, float], Tensor] = {}
    tokens = 0
    for piece in read[:MOST_PIECES]:
        states, final = exit_states(reference, piece.token_ids, piece.prompt_length)
        full = reference.parts.classify_normed(final).argmax(dim=-1)
        tokens += len(full)
        for layer, normed in states.items():
            logits = reference.parts.classify_normed(normed)
            for size, oracle in zip((*sizes, vocab_size), oracles, strict=True):
                for level in LEVELS:
                    tally = found.setdefault((size, layer, level), torch.zeros(3))
                    tally += _tally(oracle, logits, full, level).cpu()
    return [
        RowsEntry(
            rows=size,
            chosen=size == (shape.exit_rows or vocab_size),
            exit_layer=layer,
            threshold=level,
            passes=round(float(passed) / tokens, 4),
            agreement=round(float(agrees / passed), 4) if passed else None,
            same_token=round(float(same / passed), 4) if passed else None,
            layers=round(size * shape.hidden_size * shape.dtype_bytes / shape.layer_bytes, 4),
        )
        for (size, layer, level), (passed, agrees, same) in found.items()
    ]


def _tally(oracle: Reference, logits: Tensor, full: Tensor, level: float) -> Tensor:
    """[3] how many tokens pass, and of these how many are full depth's and the whole head's."""
    limits = torch.full((len(logits),), level, device=logits.device)
    passes, token = oracle.check(logits, limits, limits).exits, oracle.exit_tokens(logits)
    same = passes & (token == logits.argmax(dim=-1))
    return torch.stack([passes, passes & (token == full), same]).sum(dim=1).float()
