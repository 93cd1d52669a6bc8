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

The mask, bool [B, T], says which tokens count; None for all. Sequences are averaged; one of fewer
than two counted tokens is left out, and with none at all the loss is 0.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from exitserve_training.losses.pairs import by_rows, log_sum, products
from exitserve_training.losses.tokens import SHORTEST, counted_states, mean_of, unit_vectors

Between = Literal["tokens", "features"]
"""What decorrelation compares."""

LARGEST = 1e12
"""Entries are cut to this size where a loss squares them: float32 sums then stay finite."""

COSINE_MARGIN = 1e-6
"""The eps of algorithm 1: cosines are cut to [-1 + eps, 1 - eps], where arccos has a finite
slope. Vectors closer than 1.4e-3 rad push each other no more. float32 cosines err by 1e-7."""


def dispersion(z: Tensor, *, temperature: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Returns log mean exp(-d / temperature) over pairs of tokens, d the angle in half turns.

    Eq. 2 in the form of algorithm 1, between -1 / temperature and 0; only directions matter. A
    zero vector is taken as orthogonal to all (d = 1/2) and gets no gradient. The smaller the
    temperature, the more the closest pairs decide; the paper's is 1 (table 3 tries 0.1 to 2).
    """
    states, counted = counted_states(z, mask)
    units = unit_vectors(states)

    def block(start: int, stop: int) -> Tensor:
        return log_sum(-_angles(units, start, stop) / temperature, _pairs(counted, start, stop))

    parts, pairs = by_rows(block, units.shape[1]), _pair_count(counted)
    return mean_of(_log_mean(parts, pairs), pairs > 0)


def orthogonalization(z: Tensor, *, margin: float = 0.5, mask: Tensor | None = None) -> Tensor:
    """Returns the mean of max(0, margin - d)^2 over pairs of tokens, d the angle in half turns.

    Table 1, row 4, between 0 and margin^2: it pushes apart pairs at an acute angle and leaves
    others alone (margin 1/2, the paper's, is orthogonal). Zero vectors are taken as orthogonal to
    all and get no gradient.
    """
    states, counted = counted_states(z, mask)
    units = unit_vectors(states)

    def block(start: int, stop: int) -> Tensor:
        short = (margin - _angles(units, start, stop)).clamp_min(0.0)
        return short.square().where(_pairs(counted, start, stop), 0.0).sum(2)

    parts, pairs = by_rows(block, units.shape[1]), _pair_count(counted)
    return mean_of(parts.sum(1) / pairs.clamp_min(1), pairs > 0)


def l2_repel(
    z: Tensor,
    *,
    temperature: float = 1.0,
    norm_weight: float = 0.1,
    self_pairs: bool = True,
    mask: Tensor | None = None,
) -> Tensor:
    """Returns log mean exp(-|z_i - z_j|^2 / temperature) plus norm_weight times the mean square.

    Table 1, row 3. The squared distance is summed over D, as printed. The mean is over all N^2
    pairs of N counted tokens, each with itself too, as in the authors' published code: far apart,
    those N keep the loss at -log N, and the norm then draws the states in. Their code also has
    the weight of the norm, of which the paper gives no value: 0.1 on the mean square of the
    entries (over tokens and D). Entries beyond `LARGEST` are cut, without gradient.

    Without `self_pairs` (the table writes i != j here, and its caption calls both equivalent) such
    a weight slows the growth of the states and does not stop it: the loss is bounded below for all
    z from 2 D N / ((N - 1) temperature) on, and then smallest at z = 0.
    """
    states, counted = counted_states(z, mask)
    states = states.clamp(-LARGEST, LARGEST)
    count = counted.sum(1).clamp_min(1)
    # Distances do not change when all tokens move together; nearer to 0, |a|^2 + |b|^2 - 2ab
    # loses fewer digits, above all when the tokens share one large direction.
    centred = states - (states.detach().sum(1) / count[:, None])[:, None]

    def block(start: int, stop: int) -> Tensor:
        rows, columns = centred[:, start:stop], centred[:, start:]
        squares = rows.square().sum(-1)[:, :, None] + columns.square().sum(-1)[:, None, :]
        distance = (squares - 2.0 * products(rows, columns)).clamp_min(0.0)
        return log_sum(-distance / temperature, _pairs(counted, start, stop))

    parts, pairs = by_rows(block, centred.shape[1]), _pair_count(counted)
    repelled = _log_mean(parts, pairs)
    if self_pairs:
        # exp(0) N times, and each pair twice: log((N + 2 sum over i < j) / N^2).
        own = count.to(states.dtype).log()
        repelled = torch.logaddexp(parts.logsumexp(1) + math.log(2.0), own) - 2.0 * own
    mean_square = states.square().mean(-1).sum(1) / count
    return mean_of(repelled + norm_weight * mean_square, pairs > 0)


def decorrelation(z: Tensor, *, between: Between = "tokens", mask: Tensor | None = None) -> Tensor:
    """Returns the mean squared correlation of two tokens over their features, between 0 and 1.

    Table 1, row 2: off-diagonal entries of the covariance of standardised states. Means and
    deviations are printed with a d, and the covariance is divided by d - 1: each token is
    standardised over its d features, and tokens are compared, as in the authors' published code.

    The paper's text says "correlations between feature dimensions", which is another loss:
    `between="features"` standardises each feature over the N counted tokens. Condensed states
    need not change to make that small (docs/papers/dispersion.md).

    A token (or feature) that varies by less than 1e-5, absolute or relative to its size, is
    constant: uncorrelated with all, without gradient.
    """
    states, counted = counted_states(z, mask)
    if between == "tokens":
        vectors, compared = unit_vectors(_centred(states, -1)), counted
    else:
        # The correlation of two features is the cosine of their columns, once these are centred.
        kept = counted[..., None]
        vectors = unit_vectors(_centred(states, 1, counted.sum(1)).where(kept, 0.0).mT)
        compared = torch.ones_like(vectors[..., 0]).bool()

    def block(start: int, stop: int) -> Tensor:
        correlation = products(vectors[:, start:stop], vectors[:, start:])
        return correlation.square().where(_pairs(compared, start, stop), 0.0).sum(2)

    parts, pairs = by_rows(block, vectors.shape[1]), _pair_count(compared)
    known = (counted.sum(1) > 1) & (pairs > 0)
    return mean_of(parts.sum(1) / pairs.clamp_min(1), known)


def _centred(states: Tensor, dim: int, count: Tensor | None = None) -> Tensor:
    """States [B, T, D] less their mean along `dim`, of a size near 1.

    A correlation knows no scale: dividing by a constant size changes no value or gradient. Means
    are over the `count` [B] tokens that are not zeros; `dim` is 1 for tokens, -1 for features.
    """
    size = states.detach().abs().amax(dim, keepdim=True)
    scaled = states / size.where(size > SHORTEST, 1.0)
    if count is None:
        return scaled - scaled.mean(dim, keepdim=True)
    return scaled - scaled.sum(dim, keepdim=True) / count.clamp_min(1)[:, None, None]


def _angles(units: Tensor, start: int, stop: int) -> Tensor:
    """[B, rows, T - start]: angular distances in 0..1 of a block of unit vectors.

    Columns begin at `start`: each pair is met once, in the block of its first row.
    """
    cosine = products(units[:, start:stop], units[:, start:])
    return cosine.clamp(-1.0 + COSINE_MARGIN, 1.0 - COSINE_MARGIN).arccos() / math.pi


def _pairs(counted: Tensor, start: int, stop: int) -> Tensor:
    """Bool [B, rows, T - start]: pairs i < j of which both count."""
    return (counted[:, start:stop, None] & counted[:, None, start:]).triu(1)


def _pair_count(counted: Tensor) -> Tensor:
    """[B]: how many pairs i < j count in each sequence."""
    count = counted.sum(1)
    return count * (count - 1) // 2


def _log_mean(parts: Tensor, pairs: Tensor) -> Tensor:
    """[B]: the log mean over all pairs, from the log sums [B, T] of rows."""
    return parts.logsumexp(1) - pairs.clamp_min(1).to(parts.dtype).log()
