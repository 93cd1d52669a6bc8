"""SimReg's log-sum-exps in PyTorch, all pairs at once: the reference, and the CPU form.

Shapes: B sequences, T tokens, D components.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_sums(vectors: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """See `exitserve_kernels.simreg.log_sums`; computes float64 in float64."""
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
