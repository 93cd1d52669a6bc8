"""How spread out hidden states are, which the dispersion losses and NITP change.

B rows (sequences), T tokens, D hidden. Each sequence is measured by itself, over its counted
tokens, and the sequences are averaged; `z.reshape(1, -1, D)` measures a batch as one cloud.
"""

import torch
from torch import Tensor

from exitserve_training.losses.tokens import SHORTEST, counted_states, mean_of, unit_vectors


@torch.no_grad()
def effective_rank(z: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Returns exp(entropy of the singular values), between 1 and min(tokens, D); no gradient.

    With s the singular values of the [N, D] matrix of a sequence's tokens and p = s / sum(s), it
    is exp(-sum of p log p): how many directions the tokens use. The NITP paper plots an effective
    rank and gives no formula; this is Roy and Vetterli's (2007). The tokens are not centred, for
    a common direction of all of them is the very thing to see.

    Args:
        z: states [B, T, D].
        mask: bool [B, T] of tokens that count; None for all. A sequence with no counted token but
            zero vectors is left out of the mean.
    """
    states, _ = counted_states(z, mask)
    # Rows of zeros, which is what uncounted tokens are, change no singular value.
    peak = states.abs().amax((1, 2))
    known = peak > 0
    singular = torch.linalg.svdvals(states / peak.where(known, 1.0)[:, None, None])
    share = singular / singular.sum(-1, keepdim=True).clamp_min(SHORTEST)
    return mean_of(torch.special.entr(share).sum(-1).exp(), known)


def mean_cosine(z: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Returns the mean cosine of all pairs of a sequence's tokens: 1 when condensed, 0 when not.

    Dispersion-loss paper, section 3.2: mu = sum over i, j of cos(z_i, z_j) / N^2, over all N^2
    ordered pairs, a token with itself included. That sum is |sum of unit vectors|^2, so no
    [T, T] is needed. A zero vector has cosine 0 with all, itself included.

    Args:
        z: states [B, T, D].
        mask: bool [B, T] of tokens that count; None for all.
    """
    states, counted = counted_states(z, mask)
    count = counted.sum(1)
    mean = unit_vectors(states).sum(1) / count.clamp_min(1)[:, None]
    return mean_of(mean.square().sum(-1), count > 0)
