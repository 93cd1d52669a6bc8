"""Reference of the NITP loss, position by position."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def nitp(
    hidden: Tensor,
    shallow: Tensor,
    projector: Callable[[Tensor], Tensor],
    target_shift: int = 1,
    distance: str = "cosine",
    mask: Tensor | None = None,
) -> Tensor:
    """NITP paper: the mean of 1 - cos(P(h_t), sg(z_{t+1})), or of another distance."""
    rows, tokens = hidden.shape[:2]
    values = []
    for row in range(rows):
        for t in range(tokens - target_shift):
            ahead = t + target_shift
            if mask is not None and not (mask[row, t] and mask[row, ahead]):
                continue
            predicted = projector(hidden[row, t][None])[0]
            values.append(_distance(predicted, shallow[row, ahead].detach(), distance))
    return torch.stack(values).mean() if values else torch.zeros(())


def _distance(predicted: Tensor, target: Tensor, distance: str) -> Tensor:
    if distance == "cosine":
        cosine: Tensor = predicted @ target / (predicted.norm() * target.norm())
        return 1.0 - cosine
    if distance == "kl":
        p, q = target.softmax(0), predicted.softmax(0)
        return (p * (p / q).log()).sum()
    off = (predicted - target).abs()
    if distance == "mse":
        return off.square().mean()
    return torch.where(off < 1.0, 0.5 * off.square(), off - 0.5).mean()
