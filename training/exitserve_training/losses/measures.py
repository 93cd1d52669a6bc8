"""How spread out hidden states are, which the dispersion losses and NITP change.

B rows (sequences), T tokens, D hidden. Each sequence is measured by itself, over its counted
tokens, and the sequences are averaged; `z.reshape(1, -1, D)` measures a batch as one cloud.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exitserve.errors import ExitServeError
from exitserve_training.losses.tokens import (
    SHORTEST,
    Reduction,
    at_least_float32,
    counted_tokens,
    reduced,
    unit_vectors,
)

LARGEST = 1e12
"""Entries are cut to this size where a loss squares them: float32 sums then stay finite."""


@torch.no_grad()
def effective_rank(
    z: Tensor, *, mask: Tensor | None = None, reduction: Reduction = "mean"
) -> Tensor:
    """Returns exp(entropy of the singular values), between 1 and min(tokens, D); no gradient.

    With s the singular values of the [N, D] matrix of a sequence's tokens and p = s / sum(s), it
    is exp(-sum of p log p): how many directions the tokens use. The NITP paper plots an effective
    rank and gives no formula; this is Roy and Vetterli's (2007). The tokens are not centred, for
    a common direction of all of them is the very thing to see.

    Args:
        z: states [B, T, D].
        mask: bool [B, T] of tokens that count; None for all.
        reduction: `"mean"` over sequences, or `"none"` for one number each, [B]. A sequence with
            no counted token but zero vectors gives 0 and is left out of the mean.

    Raises:
        ExitServeError: the shapes of z and mask disagree, or the reduction is unknown.
    """
    states, _ = prepared(z, mask)
    # Rows of zeros, which is what uncounted tokens are, change no singular value.
    peak = states.abs().amax((1, 2))
    known = peak > 0
    singular = torch.linalg.svdvals(states / peak.where(known, 1.0)[:, None, None])
    share = singular / singular.sum(-1, keepdim=True).clamp_min(SHORTEST)
    return reduced(torch.special.entr(share).sum(-1).exp(), known, reduction)


def mean_cosine(z: Tensor, *, mask: Tensor | None = None, reduction: Reduction = "mean") -> Tensor:
    """Returns the mean cosine of all pairs of a sequence's tokens: 1 when condensed, 0 when not.

    Dispersion-loss paper, section 3.2: mu = sum over i, j of cos(z_i, z_j) / N^2, over all N^2
    ordered pairs, a token with itself included. That sum is |sum of unit vectors|^2, so no
    [T, T] is needed. A zero vector has cosine 0 with all, itself included.

    Args:
        z: states [B, T, D].
        mask: bool [B, T] of tokens that count; None for all.
        reduction: `"mean"` over sequences, or `"none"` for one number each, [B]. A sequence
            without counted tokens gives 0 and is left out of the mean.

    Raises:
        ExitServeError: the shapes of z and mask disagree, or the reduction is unknown.
    """
    states, counted = prepared(z, mask)
    count = counted.sum(1)
    mean = unit_vectors(states).sum(1) / count.clamp_min(1)[:, None]
    return reduced(mean.square().sum(-1), count > 0, reduction)


def prepared(z: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns z, at least float32, with zeros where it does not count; and bool [B, T]: what does.

    Raises:
        ExitServeError: z is not [B, T, D], or mask is not [B, T].
    """
    if z.dim() != 3 or z.numel() == 0:
        raise ExitServeError(
            f"hidden states have shape {tuple(z.shape)}; expected [B, T, D], none of them 0."
        )
    counted = counted_tokens(z, mask)
    return at_least_float32(z).where(counted[..., None], 0.0), counted
