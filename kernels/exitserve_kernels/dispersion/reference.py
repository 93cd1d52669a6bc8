"""The dispersion loss's log-sum-exp in PyTorch, all pairs at once: reference, and CPU form.

Shapes: B sequences, T tokens, D components.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MARGIN = 1e-6
"""The eps of algorithm 1: cosines are clamped to [-1 + eps, 1 - eps], where arccos has a finite
slope; clamped pairs give no gradient."""


def log_sum(units: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """See `exitserve_kernels.dispersion.log_sum`; computes float64 in float64."""
    wide = units.to(torch.promote_types(units.dtype, torch.float32))
    wide = wide.masked_fill(~mask[..., None], 0.0)
    # Under autocast these products would be bfloat16, in which every cosine above 0.998 is 1.
    with torch.autocast(units.device.type, enabled=False):
        cosines = (wide @ wide.mT).clamp(-1.0 + MARGIN, 1.0 - MARGIN)
    logits = -cosines.arccos() / (math.pi * temperature)
    pairs = mask[:, :, None] & mask[:, None, :]
    pairs &= ~torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
    return logits.masked_fill(~pairs, -math.inf).flatten(1).logsumexp(1)
