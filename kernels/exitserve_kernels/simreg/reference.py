"""SimReg's log-sum-exps in PyTorch: all pairs at once. The truth, and the form without a GPU.

Shapes: B sequences, T tokens, D components.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def check(vectors: Tensor, labels: Tensor, temperature: float) -> None:
    """Raises `ValueError` for what cannot be compared."""
    if vectors.dim() != 3 or labels.shape != vectors.shape[:2]:
        raise ValueError(
            f"vectors {tuple(vectors.shape)} and labels {tuple(labels.shape)} do not go together; "
            f"expected [B, T, D] and [B, T]."
        )
    if not vectors.is_floating_point():
        raise ValueError(f"vectors are {vectors.dtype}; expected a floating-point type.")
    if labels.dtype != torch.int64:
        raise ValueError(f"labels are {labels.dtype}; expected torch.int64.")
    if labels.device != vectors.device:
        raise ValueError(
            f"vectors are on {vectors.device} and labels on {labels.device}; expected one device."
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature {temperature!r} must be a finite number above 0.")


def log_sums(vectors: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Over negatives and over positives, [B, T] each, in float32 (float64 for float64)."""
    counted = labels >= 0
    wide = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    wide = wide.masked_fill(~counted[..., None], 0.0)
    # Under autocast these products would be bfloat16, off by 0.4 after division by 0.01.
    with torch.autocast(vectors.device.type, enabled=False):
        scores = wide @ wide.mT / temperature
    both = counted[:, :, None] & counted[:, None, :]
    same = labels[:, :, None] == labels[:, None, :]
    negatives, positives = (
        scores.masked_fill(~chosen, -math.inf).logsumexp(-1)
        for chosen in (both & ~same, both & same)
    )
    return negatives, positives
