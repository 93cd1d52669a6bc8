"""Losses that spread the hidden states of a sequence: dispersion and its three alternatives.

Paper: dispersion loss, table 1, eq. 2 and algorithm 1. Each is a function of one layer's states
z [B, T, D], computed for each sequence by itself. The paper aggregates it over all layers (the
authors' published code: the mean over the layers after the embedding) and adds it to the
training loss with weight 0.1 (table 3).

    dispersion          log mean exp(-d_ij / temperature)      d = arccos(cos(z_i, z_j)) / pi
    orthogonalization   mean max(0, margin - d_ij)^2           the same d, 1/2 = orthogonal
    l2_repel            log mean exp(-|z_i - z_j|^2 / temperature) + norm_weight * mean z^2
    decorrelation       mean corr_ij^2                         of tokens, over their features

Means stand where the table has sums, as in algorithm 1, so that values do not grow with T or D:
over all pairs of counted tokens i != j. l2_repel alone pairs tokens with themselves too: the
caption calls that equivalent, but within a logarithm it is what bounds the loss from below.
Pairs are taken in blocks of rows, each block computed again in backward: [B, BLOCK_ROWS, T]
numbers at a time, never [B, T, T].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from exitserve.errors import ExitServeError
from exitserve_kernels.dispatch import choose
from exitserve_kernels.dispersion import log_sum
from exitserve_training.losses.measures import LARGEST, prepared
from exitserve_training.losses.tokens import (
    SHORTEST,
    Reduction,
    check_choice,
    reduced,
    unit_vectors,
)

BLOCK_ROWS = 128
"""Rows of the pair matrix that exist at once."""

Between = Literal["tokens", "features"]
"""What decorrelation compares."""

COSINE_MARGIN = 1e-6
"""The eps of algorithm 1: cosines are cut to [-1 + eps, 1 - eps], where arccos has a finite
slope. Vectors closer than 1.4e-3 rad push each other no more. float32 cosines err by 1e-7."""


def dispersion(
    z: Tensor,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Returns log mean exp(-d / temperature) over pairs of tokens, d the angle in half turns.

    Eq. 2 in the form of algorithm 1, between -1 / temperature and 0; only directions matter. A
    zero vector is taken as orthogonal to all (d = 1/2) and gets no gradient. Paper default:
    temperature 1 (table 3 tries 0.1 to 2).

    Args:
        z: states [B, T, D] of one layer.
        temperature: tau, positive; the smaller, the more the closest pairs decide.
        mask: bool [B, T] of tokens that count; None for all.
        reduction: `"mean"` over sequences, or `"none"` for one number each, [B]. A sequence of
            fewer than two counted tokens gives 0 and is left out of the mean.

    Raises:
        ExitServeError: temperature is not positive, or the shapes of z and mask disagree.
    """
    _check_at_least("temperature", temperature, 0.0, exclusive=True)
    states, counted = prepared(z, mask)

    def block(units: Tensor, counted: Tensor, start: int) -> Tensor:
        logits = -_angles(units, start) / temperature
        return _log_sum_exp(logits, _pairs(counted, start))

    units = unit_vectors(states)
    if units.dtype == torch.float32 and choose("dispersion", units.device) == "triton":
        # The kernel's sum has each pair twice, as (i, j) and as (j, i).
        parts = log_sum(units, counted, temperature)[:, None] - math.log(2.0)
    else:
        parts = _blocks(block, units, counted)
    pairs = _pair_count(counted)
    return reduced(_log_mean_exp(parts, pairs), pairs > 0, reduction)


def orthogonalization(
    z: Tensor,
    *,
    margin: float = 0.5,
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Returns the mean of max(0, margin - d)^2 over pairs of tokens, d the angle in half turns.

    Table 1, row 4, between 0 and margin^2: it pushes apart pairs at an acute angle and leaves
    others alone. Zero vectors are taken as orthogonal to all (d = 1/2) and get no gradient.

    Args:
        z: states [B, T, D] of one layer.
        margin: angular distance that is far enough, in 0..1; 1/2 (the paper's) is orthogonal.
        mask: bool [B, T] of tokens that count; None for all.
        reduction: `"mean"` over sequences, or `"none"` for one number each, [B]. A sequence of
            fewer than two counted tokens gives 0 and is left out of the mean.

    Raises:
        ExitServeError: margin is out of range, or the shapes of z and mask disagree.
    """
    if not 0.0 <= margin <= 1.0:
        raise ExitServeError(f"margin {margin!r} must lie in 0..1; 0.5 means orthogonal.")
    states, counted = prepared(z, mask)

    def block(units: Tensor, counted: Tensor, start: int) -> Tensor:
        short = (margin - _angles(units, start)).clamp_min(0.0)
        return short.square().where(_pairs(counted, start), 0.0).sum((1, 2))

    parts = _blocks(block, unit_vectors(states), counted)
    pairs = _pair_count(counted)
    return reduced(parts.sum(1) / pairs.clamp_min(1), pairs > 0, reduction)


def l2_repel(
    z: Tensor,
    *,
    temperature: float = 1.0,
    norm_weight: float = 0.1,
    self_pairs: bool = True,
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Returns log mean exp(-|z_i - z_j|^2 / temperature) plus norm_weight times the mean square.

    Table 1, row 3. The squared distance is summed over D, as printed. The mean is over all N^2
    pairs of N counted tokens, each with itself too, as in the authors' published code: far apart,
    those N keep the loss at -log N, and the norm then draws the states in. Their code also has
    the weight of the norm, of which the paper gives no value: 0.1 on the mean square of the
    entries (over tokens and D). Entries beyond `LARGEST` are cut, without gradient.

    Without the pairs of a token with itself (the table writes i != j here, and its caption calls
    both equivalent) such a weight slows the growth of the states and does not stop it: the loss
    is bounded below for all z from 2 D N / ((N - 1) temperature) on, and then smallest at z = 0.

    Args:
        z: states [B, T, D] of one layer.
        temperature: tau, positive, in units of squared distance.
        norm_weight: lambda_norm, not negative.
        self_pairs: whether the mean has each token paired with itself.
        mask: bool [B, T] of tokens that count; None for all.
        reduction: `"mean"` over sequences, or `"none"` for one number each, [B]. A sequence of
            fewer than two counted tokens gives 0 and is left out of the mean.

    Raises:
        ExitServeError: temperature is not positive, norm_weight is negative, or the shapes of z
            and mask disagree.
    """
    _check_at_least("temperature", temperature, 0.0, exclusive=True)
    _check_at_least("norm_weight", norm_weight, 0.0)
    states, counted = prepared(z, mask)
    states = states.clamp(-LARGEST, LARGEST)
    count = counted.sum(1).clamp_min(1)
    # Distances do not change when all tokens move together; nearer to 0, |a|^2 + |b|^2 - 2ab
    # loses fewer digits, above all when the tokens share one large direction.
    centre = states.detach().sum(1) / count[:, None]
    centred = states - centre[:, None]

    def block(centred: Tensor, counted: Tensor, start: int) -> Tensor:
        rows, columns = centred[:, start : start + BLOCK_ROWS], centred[:, start:]
        squares = rows.square().sum(-1)[:, :, None] + columns.square().sum(-1)[:, None, :]
        distance = (squares - 2.0 * _products(centred, start)).clamp_min(0.0)
        return _log_sum_exp(-distance / temperature, _pairs(counted, start))

    parts = _blocks(block, centred, counted)
    mean_square = states.square().mean(-1).sum(1) / count
    pairs = _pair_count(counted)
    repelled = _log_mean_exp(parts, pairs)
    if self_pairs:
        # exp(0) N times, and each pair twice: log((N + 2 sum over i < j) / N^2).
        own = count.to(states.dtype).log()
        repelled = torch.logaddexp(parts.logsumexp(1) + math.log(2.0), own) - 2.0 * own
    loss = repelled + norm_weight * mean_square
    return reduced(loss, pairs > 0, reduction)


def decorrelation(
    z: Tensor,
    *,
    between: Between = "tokens",
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Returns the mean squared correlation of two tokens over their features, between 0 and 1.

    Table 1, row 2: off-diagonal entries of the covariance of standardised states. Means and
    deviations are printed with a d, and the covariance is divided by d - 1: each token is
    standardised over its d features, and tokens are compared, as in the authors' published code.
    For the table's sum over m != n instead of the mean, multiply by N (N - 1).

    The paper's text says "correlations between feature dimensions", which is another loss:
    `between="features"` standardises each feature over the N counted tokens. Condensed states
    need not change to make that small (docs/papers/dispersion.md).

    A token (or feature) that varies by less than 1e-5, absolute or relative to its size, is
    constant: uncorrelated with all, without gradient.

    Args:
        z: states [B, T, D] of one layer.
        between: `"tokens"`, or `"features"`.
        mask: bool [B, T] of tokens that count; None for all.
        reduction: `"mean"` over sequences, or `"none"` for one number each, [B]. A sequence of
            fewer than two counted tokens gives 0 and is left out of the mean.

    Raises:
        ExitServeError: `between` is unknown, or the shapes of z and mask disagree.
    """
    check_choice("between", between, get_args(Between))
    states, counted = prepared(z, mask)
    if between == "tokens":
        vectors = unit_vectors(_centred(states, -1))
    else:
        # The correlation of two features is the cosine of their columns, once these are centred.
        kept = counted[..., None]
        vectors = unit_vectors(_centred(states, 1, counted.sum(1)).where(kept, 0.0).mT)
    compared = counted if between == "tokens" else torch.ones_like(vectors[..., 0]).bool()

    def block(vectors: Tensor, compared: Tensor, start: int) -> Tensor:
        correlation = _products(vectors, start)
        return correlation.square().where(_pairs(compared, start), 0.0).sum((1, 2))

    parts = _blocks(block, vectors, compared)
    pairs = _pair_count(compared)
    known = (counted.sum(1) > 1) & (pairs > 0)
    return reduced(parts.sum(1) / pairs.clamp_min(1), known, reduction)


def _centred(states: Tensor, dim: int, count: Tensor | None = None) -> Tensor:
    """States [B, T, D] less their mean along `dim`, of a size near 1.

    A correlation knows no scale: dividing by a constant size changes no value or gradient.

    Args:
        states: zeros where they do not count.
        dim: 1 for each feature's mean over tokens, -1 for each token's over features.
        count: [B], tokens that count, for the mean over them.
    """
    size = states.detach().abs().amax(dim, keepdim=True)
    scaled = states / size.where(size > SHORTEST, 1.0)
    if count is None:
        return scaled - scaled.mean(dim, keepdim=True)
    return scaled - scaled.sum(dim, keepdim=True) / count.clamp_min(1)[:, None, None]


def _blocks(
    block: Callable[[Tensor, Tensor, int], Tensor], vectors: Tensor, counted: Tensor
) -> Tensor:
    """[B, blocks]: `block` of each block of rows; computed again in backward."""
    recompute = torch.is_grad_enabled() and vectors.requires_grad
    parts: list[Tensor] = []
    for start in range(0, vectors.shape[1], BLOCK_ROWS):
        if recompute:
            part: Tensor = checkpoint(
                block, vectors, counted, start, use_reentrant=False, preserve_rng_state=False
            )
        else:
            part = block(vectors, counted, start)
        parts.append(part)
    return torch.stack(parts, dim=1)


def _products(vectors: Tensor, start: int) -> Tensor:
    """[B, rows, T - start]: inner products of a block of rows with all rows from `start` on.

    Each pair is met once, in the block of its first row.
    """
    # Under autocast these products would be bf16, in which every cosine above 0.998 is 1.
    with torch.autocast(vectors.device.type, enabled=False):
        return vectors[:, start : start + BLOCK_ROWS] @ vectors[:, start:].mT


def _angles(units: Tensor, start: int) -> Tensor:
    """[B, rows, T - start]: angular distances in 0..1 of unit vectors."""
    cosine = _products(units, start).clamp(-1.0 + COSINE_MARGIN, 1.0 - COSINE_MARGIN)
    return cosine.arccos() / math.pi


def _pairs(counted: Tensor, start: int) -> Tensor:
    """Bool [B, rows, T - start]: pairs i < j of which both count."""
    rows, columns = counted[:, start : start + BLOCK_ROWS], counted[:, start:]
    return (rows[:, :, None] & columns[:, None, :]).triu(1)


def _pair_count(counted: Tensor) -> Tensor:
    """[B]: how many pairs i < j count in each sequence."""
    count = counted.sum(1)
    return count * (count - 1) // 2


def _log_sum_exp(logits: Tensor, pairs: Tensor) -> Tensor:
    """[B]: log of the sum of exp(logits) over the pairs that count; -inf with none of them."""
    return logits.masked_fill(~pairs, -math.inf).flatten(1).logsumexp(1)


def _log_mean_exp(parts: Tensor, pairs: Tensor) -> Tensor:
    """[B]: the log mean over all pairs from the log sums [B, blocks] of the blocks."""
    return parts.logsumexp(1) - pairs.clamp_min(1).to(parts.dtype).log()


def _check_at_least(name: str, value: float, least: float, *, exclusive: bool = False) -> None:
    fits = least < value if exclusive else least <= value
    if not (fits and math.isfinite(value)):
        bound = "greater than" if exclusive else "at least"
        raise ExitServeError(f"{name} {value!r} must be a finite number, {bound} {least:g}.")
