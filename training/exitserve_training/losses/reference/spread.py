"""References of the dispersion losses and of the measures of spread, pair by pair."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def dispersion(z: Tensor, temperature: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Dispersion-loss paper, eq. 2, less the log of the number of pairs (algorithm 1)."""
    values = []
    for tokens in _sequences(z, mask):
        exponentials = [torch.exp(-angular_distance(a, b) / temperature) for a, b in _pairs(tokens)]
        values.append(torch.stack(exponentials).mean().log())
    return _mean(values, z)


def orthogonalization(z: Tensor, margin: float = 0.5, mask: Tensor | None = None) -> Tensor:
    """Dispersion-loss paper, table 1, row 4."""
    values = []
    for tokens in _sequences(z, mask):
        short = [(margin - angular_distance(a, b)).clamp_min(0.0) for a, b in _pairs(tokens)]
        values.append(torch.stack(short).square().mean())
    return _mean(values, z)


def l2_repel(
    z: Tensor,
    temperature: float = 1.0,
    norm_weight: float = 0.1,
    mask: Tensor | None = None,
    self_pairs: bool = True,
) -> Tensor:
    """Dispersion-loss paper, table 1, row 3, with means for sums."""
    values = []
    for tokens in _sequences(z, mask):
        pairs = _pairs(tokens) + [(a, a) for a in tokens if self_pairs]
        logits = [-(a - b).square().sum() / temperature for a, b in pairs]
        repel = torch.stack(logits).logsumexp(0) - math.log(len(logits))
        values.append(repel + norm_weight * tokens.square().mean())
    return _mean(values, z)


def decorrelation(z: Tensor, mask: Tensor | None = None, between: str = "tokens") -> Tensor:
    """Dispersion-loss paper, table 1, row 2, with the mean for the sum.

    As printed, mu_d and sigma_d are each token's over its d features, and the covariance is
    divided by d - 1. `features` exchanges tokens and features.
    """
    values = []
    for tokens in _sequences(z, mask):
        rows = tokens if between == "tokens" else tokens.T
        standard = (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)
        covariance = standard @ standard.T / (rows.shape[1] - 1)
        number = len(rows)
        squares = [covariance[m, n] ** 2 for m in range(number) for n in range(number) if m != n]
        values.append(torch.stack(squares).mean())
    return _mean(values, z)


def mean_cosine(z: Tensor, mask: Tensor | None = None) -> Tensor:
    """Dispersion-loss paper, section 3.2: mu, over all N^2 ordered pairs."""
    values = []
    for tokens in _sequences(z, mask, least=1):
        cosines = [a @ b / (a.norm() * b.norm()) for a in tokens for b in tokens]
        values.append(torch.stack(cosines).mean())
    return _mean(values, z)


def effective_rank(z: Tensor, mask: Tensor | None = None) -> Tensor:
    """Roy and Vetterli 2007: exp of the entropy of the singular values' shares."""
    values = []
    for tokens in _sequences(z, mask, least=1):
        singular = torch.linalg.svdvals(tokens)
        share = singular[singular > 0] / singular.sum()
        values.append(torch.exp(-(share * share.log()).sum()))
    return _mean(values, z)


def angular_distance(a: Tensor, b: Tensor) -> Tensor:
    """Dispersion-loss paper, table 1: arccos(cossim(a, b)) / pi."""
    cosine: Tensor = a @ b / (a.norm() * b.norm())
    return cosine.arccos() / math.pi


def _sequences(z: Tensor, mask: Tensor | None, least: int = 2) -> list[Tensor]:
    """The counted tokens [N, D] of each sequence that has enough of them."""
    z = z if z.dtype == torch.float64 else z.float()
    rows = [row if mask is None else row[mask[index]] for index, row in enumerate(z)]
    return [row for row in rows if len(row) >= least]


def _pairs(tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """All ordered pairs i != j."""
    return [(a, b) for i, a in enumerate(tokens) for j, b in enumerate(tokens) if i != j]


def _mean(values: list[Tensor], z: Tensor) -> Tensor:
    return torch.stack(values).mean() if values else torch.zeros((), device=z.device)
