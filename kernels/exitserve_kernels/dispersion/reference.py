"""The dispersion loss's log-sum-exp in PyTorch: all pairs at once. The truth, and without a GPU.

Shapes: B sequences, T tokens, D components.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MARGIN = 1e-6
"""The eps of algorithm 1: cosines are cut to [-1 + eps, 1 - eps], where arccos has a finite
slope; beyond, a pair gives no gradient."""


def check(units: Tensor, mask: Tensor, temperature: float) -> None:
    """Raises `ValueError` for what has no angles."""
    if units.dim() != 3 or mask.shape != units.shape[:2]:
        raise ValueError(
            f"units {tuple(units.shape)} and mask {tuple(mask.shape)} do not go together; "
            f"expected [B, T, D] and [B, T]."
        )
    if not units.is_floating_point():
        raise ValueError(f"units are {units.dtype}; expected a floating-point type.")
    if mask.dtype != torch.bool:
        raise ValueError(f"mask is {mask.dtype}; expected torch.bool.")
    if mask.device != units.device:
        raise ValueError(
            f"units are on {units.device} and mask on {mask.device}; expected one device."
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature {temperature!r} must be a finite number above 0.")


def log_sum(units: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """Over ordered pairs, [B], in float32 (float64 for float64)."""
    wide = units.to(torch.promote_types(units.dtype, torch.float32))
    wide = wide.masked_fill(~mask[..., None], 0.0)
    # Under autocast these products would be bfloat16, in which every cosine above 0.998 is 1.
    with torch.autocast(units.device.type, enabled=False):
        cosines = (wide @ wide.mT).clamp(-1.0 + MARGIN, 1.0 - MARGIN)
    logits = -cosines.arccos() / (math.pi * temperature)
    pairs = mask[:, :, None] & mask[:, None, :]
    pairs &= ~torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
    return logits.masked_fill(~pairs, -math.inf).flatten(1).logsumexp(1)
