"""Comparison of a sequence's tokens with each other, for SimReg and its baselines.

The similarities [T, T] exist for `ROWS` rows at a time and are computed again in backward.

Shapes: B rows (sequences), T tokens, D hidden, R of the T compared at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from exitserve.errors import ExitServeError
from exitserve_training.losses.tokens import IGNORED, at_least_float32

ROWS = 256
"""Tokens of each sequence compared at once: B * ROWS * T similarities exist at any moment."""

ZERO = 1e-12
"""A vector whose components are all below this has no direction: it counts as the zero vector,
whose cosine with every vector is 0 with zero gradient."""

FAR = -1e37
"""The score of a pair that is left out: exp of it is 0, and unlike -inf it has a gradient of 0."""


def check_temperature(name: str, value: float) -> None:
    """Raises ExitServeError unless `value` is a temperature at which float32 scores are finite."""
    if not 1e-6 <= value < math.inf:
        raise ExitServeError(f"{name} {value!r} must be a number of at least 1e-6, such as 0.01.")


def labelled_tokens(embeddings: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
    """Bool [B, T]: the tokens that have a label and are not masked.

    Raises:
        ExitServeError: the shapes of embeddings, labels and mask disagree, or hold no token.
    """
    if embeddings.dim() != 3 or embeddings.shape[:2] != labels.shape or not embeddings.numel():
        raise ExitServeError(
            f"embeddings of shape {tuple(embeddings.shape)} do not fit labels of shape "
            f"{tuple(labels.shape)}; expected [B, T, D] and [B, T], with at least one token."
        )
    counted = labels != IGNORED
    if mask is None:
        return counted
    if mask.shape != labels.shape:
        raise ExitServeError(
            f"mask has shape {tuple(mask.shape)}, labels {tuple(labels.shape)}; they must be equal."
        )
    return counted & mask.bool()


def counted_vectors(embeddings: Tensor, counted: Tensor) -> Tensor:
    """The embeddings in at least float32, zero (with zero gradient) where not counted."""
    wide = at_least_float32(embeddings)
    # Filled, not multiplied: padding may hold NaN, and 0 * NaN is NaN.
    return wide.masked_fill(~counted[..., None], 0.0)


def similarities(rows: Tensor, columns: Tensor, temperature: float) -> Tensor:
    """Inner products / temperature of rows [B, R, D] with columns [B, T, D]: [B, R, T]."""
    # bfloat16 products of unit vectors are off by 2^-8, at temperature 0.01 by 0.4: no autocast.
    with torch.autocast(rows.device.type, enabled=False):
        return rows @ columns.transpose(1, 2) / temperature


def log_sum(scores: Tensor, chosen: Tensor) -> Tensor:
    """Log-sum-exp over the chosen entries of the last dimension; `FAR` where none is chosen."""
    return scores.masked_fill(~chosen, FAR).logsumexp(dim=-1)


def row_losses(block: Callable[[int, int], Tensor], tokens: int) -> Tensor:
    """Returns [B, T] from `block(start, stop)`, the losses [B, stop - start] of some rows.

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
