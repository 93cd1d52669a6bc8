"""Compaction in PyTorch: the truth, and the form that runs without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def compact(exits: Tensor, batch: Any, make: Any) -> tuple[Any, Tensor, Tensor]:
    """See `compact_rows`; `make` builds a batch."""
    device, num_rows = exits.device, len(exits)
    kept = (~exits).nonzero().squeeze(1)
    sizes = batch.starts.diff()[kept]
    tokens = _tokens_of(batch.starts, kept)
    starts = torch.full_like(batch.starts, len(tokens))
    starts[: len(kept) + 1] = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).to(starts.dtype)
    rows = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
    rows[: len(kept)] = kept.to(torch.int32)
    left = make(
        states=_first(batch.states, tokens, 0),
        positions=_first(batch.positions, tokens, 0),
        slots=_first(batch.slots, tokens, -1),
        starts=starts,
        lengths=_first(batch.lengths, kept, 0),
        blocks=_first(batch.blocks, kept, 0),
    )
    return left, rows, torch.tensor([len(kept)], dtype=torch.int32, device=device)


def _tokens_of(starts: Tensor, rows: Tensor) -> Tensor:
    """Indices of the tokens of some rows."""
    spans = [
        torch.arange(int(starts[row]), int(starts[row + 1]), device=starts.device)
        for row in rows.tolist()
    ]
    return torch.cat(spans) if spans else starts.new_empty(0, dtype=torch.int64)


def _first(old: Tensor, chosen: Tensor, rest: int) -> Tensor:
    """The chosen entries first, and `rest` in all others."""
    new = torch.full_like(old, rest)
    new[: len(chosen)] = old[chosen]
    return new
