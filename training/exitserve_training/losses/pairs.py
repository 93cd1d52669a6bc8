"""Comparison of a sequence's tokens with each other, for losses over pairs of tokens.

The similarities [T, T] exist for `ROWS` rows at a time and are computed again in backward.

Shapes: B rows (sequences), T tokens, D hidden, R of the T compared at once.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from exitserve_training.losses.tokens import IGNORED

ROWS = 256
"""Tokens of each sequence compared at once: B * ROWS * T similarities exist at any moment."""

ZERO = 1e-12
"""A vector whose components are all below this has no direction: it counts as the zero vector,
whose cosine with every vector is 0 with zero gradient."""

FAR = -1e37
"""The score of a pair that is left out: exp of it is 0, and unlike -inf it has a gradient of 0."""


def products(rows: Tensor, columns: Tensor) -> Tensor:
    """Inner products of rows [B, R, D] with columns [B, T, D]: [B, R, T]."""
    # bfloat16 products of unit vectors are off by 2^-8, at temperature 0.01 by 0.4: no autocast.
    with torch.autocast(rows.device.type, enabled=False):
        return rows @ columns.transpose(1, 2)


def log_sum(scores: Tensor, chosen: Tensor) -> Tensor:
    """Log-sum-exp over the chosen entries of the last dimension; `FAR` where none is chosen."""
    return scores.masked_fill(~chosen, FAR).logsumexp(dim=-1)


def by_rows(block: Callable[[int, int], Tensor], tokens: int) -> Tensor:
    """Returns [B, T] from `block(start, stop)`, numbers [B, stop - start] of some rows.

    Backward runs each block again (it must be deterministic) instead of keeping its [B, R, T].
    """
    recompute = torch.is_grad_enabled()
    parts: list[Tensor] = []
    for start in range(0, tokens, ROWS):
        stop = min(start + ROWS, tokens)
        if recompute:
            part = checkpoint(block, start, stop, use_reentrant=False, preserve_rng_state=False)
        else:
            part = block(start, stop)
        parts.append(part)
    return torch.cat(parts, dim=1)


def label_counts(labels: Tensor, counted: Tensor) -> Tensor:
    """How many counted tokens of its row share each token's label, itself included: [B, T]."""
    keys = labels.masked_fill(~counted, IGNORED).contiguous()
    ordered = keys.sort(dim=1).values
    first = torch.searchsorted(ordered, keys)
    return (torch.searchsorted(ordered, keys, right=True) - first).masked_fill(~counted, 0)
