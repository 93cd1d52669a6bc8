"""How alike the features of layers are: COS, CKA, and how far classes have collapsed (NC1).

Aligned-training paper, section 2. N samples, D hidden, L layers, K classes. A sample's feature is
the hidden state of the one token on which its prediction is based; features are finite. All is
computed in float64.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from exitserve_training.losses.tokens import unit_vectors

# The smallest normal float64: only a zero vector has no direction.
_SHORTEST = torch.finfo(torch.float64).tiny


def centred(features: Tensor) -> Tensor:
    """Returns features [N, D] less the mean of all samples (footnote 1), in float64.

    Samples that are all equal give exact zeros, not rounding errors that would then be taken for
    directions: such are the states before the first layer where all texts end in the same token.
    """
    states = features.double()
    return states - (states[0] + (states - states[0]).mean(0))


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """Returns the cosine of each sample's two features [N, D], [N] in float64.

    COS = <a, b> / (|a| |b|), of a and b as they are: centre them first for the paper's. A zero
    vector has cosine 0 with all, itself included; any other has cosine 1 with itself.
    """
    return (_units(a) * _units(b)).sum(-1).clamp(-1.0, 1.0)


def cos_matrix(features: Sequence[Tensor]) -> Tensor:
    """Returns [L, L] in float64: the mean `cosines` of all pairs of layers, centred.

    The diagonal is the share of samples whose feature is not zero: 1, but for degenerate layers.

    Args:
        features: L layers' features [N, D], of the same samples.
    """
    # The sum over samples of a sample's cosine is one long dot product.
    products = _dot_products([_units(centred(layer)) for layer in features])
    return (products / len(features[0])).clamp(-1.0, 1.0)


def cka_matrix(features: Sequence[Tensor]) -> Tensor:
    """Returns [L, L] in float64: linear CKA of all pairs of layers, between 0 and 1.

    Eq. 2, with X and Y the centred features [N, D] of two layers (the paper's H transposed):

        CKA = trace(Y Y^T X X^T) / (|X X^T| |Y Y^T|)

    with Frobenius norms. A layer whose features are all equal has CKA 0 with all, itself included;
    any other has CKA 1 with itself.

    Args:
        features: L layers' features [N, D], of the same samples; D may differ between layers.
    """
    states = [_scaled(centred(layer)) for layer in features]
    products = _dot_products([one @ one.T for one in states])
    norms = products.diagonal().sqrt()
    scale = torch.outer(norms, norms)
    return (products / scale.where(scale > 0, 1.0)).clamp(0.0, 1.0)


def nc1(features: Tensor, classes: Tensor) -> float | None:
    """Returns within-class over between-class variability: 0 when every class is one point.

    NC1 = trace(S_W pinv(S_B)) / K (Papyan et al. 2020, whom the paper follows), with h_i the
    feature of sample i, m_k the mean of class k and m the mean of all samples:

        S_W = 1/N sum over i of (h_i - m_class(i)) (h_i - m_class(i))^T
        S_B = 1/K sum over k of (m_k - m) (m_k - m)^T

    Classes count alike in S_B, however many samples they have. Directions in which the class
    means do not differ are left out by pinv. With M = U s V^T the [K, D] matrix of
    (m_k - m) / sqrt(K), pinv(S_B) = V s^-2 V^T, so that no [D, D] is needed.

    Args:
        features: [N, D].
        classes: integers [N]; those that occur are the K classes, at least 2. Where their means
            are all equal the ratio has no value: None.
    """
    states = _scaled(centred(features))
    names, index, counts = torch.unique(classes, return_inverse=True, return_counts=True)
    sums = states.new_zeros(len(names), states.shape[1]).index_add_(0, index, states)
    means = sums / counts[:, None]
    _, lengths, directions = torch.linalg.svd(means / len(names) ** 0.5, full_matrices=False)
    # As torch.linalg.pinv(S_B) cuts its eigenvalues, lengths^2; and shorter than `rounding`, where
    # the largest entry of the states is 1, is the rounding error of equal means.
    rounding = states.shape[1] * torch.finfo(torch.float64).eps
    kept = (lengths.square() > lengths[0].square() * rounding) & (lengths > rounding)
    if not kept.any():
        return None
    spread = (states - means[index]) @ (directions[kept] / lengths[kept, None]).T
    return float(spread.square().sum() / (len(states) * len(names)))


def _dot_products(layers: Sequence[Tensor]) -> Tensor:
    """[L, L]: the sums of the products of two layers' entries."""
    rows = [torch.stack([(one * other).sum() for other in layers]) for one in layers]
    return torch.stack(rows)


def _units(vectors: Tensor) -> Tensor:
    """Returns vectors [..., D] in float64, divided by their lengths; zero vectors stay zero."""
    return unit_vectors(vectors.double(), _SHORTEST)


def _scaled(states: Tensor) -> Tensor:
    """Returns states divided by their largest entry, so that no power of them overflows."""
    peak = states.abs().amax()
    return states / peak.where(peak > 0, 1.0)
