"""How alike the features of layers are: COS, CKA, and how far classes have collapsed (NC1).

Aligned-training paper, section 2. N samples, D hidden, L layers, K classes. A sample's feature is
the hidden state of the one token on which its prediction is based. All is computed in float64;
the layers may be of any type, for only one or two of them, or some samples of all, are held in
float64 at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exitserve.errors import ExitServeError
from exitserve_training.losses.tokens import unit_vectors

_BLOCK_ELEMENTS = 2**23
"""Entries of all layers' unit vectors held at once by `cos_matrix` (64 MB)."""

# The smallest normal float64: only a zero vector has no direction.
_SHORTEST = torch.finfo(torch.float64).tiny


def centred(features: Tensor) -> Tensor:
    """Returns features [N, D] less the mean of all samples (footnote 1), in float64.

    Samples that are all equal give exact zeros, not rounding errors that would then be taken for
    directions: such are the states before the first layer where all texts end in the same token.

    Raises:
        ExitServeError: the features are not [N, D], or hold NaN or infinity.
    """
    states = _checked(features)
    return states - _mean(states)


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """Returns the cosine of each sample's two features, [N] in float64, between -1 and 1.

    COS = <a, b> / (|a| |b|), of a and b as they are: centre them first for the paper's. A zero
    vector has cosine 0 with all, itself included; any other has cosine 1 with itself.

    Args:
        a: features [N, D] of one layer.
        b: features [N, D] of another, of the same samples.

    Raises:
        ExitServeError: the shapes differ or are not [N, D], or a or b hold NaN or infinity.
    """
    _check_same("shape", [tuple(a.shape), tuple(b.shape)])
    return (_units(_checked(a)) * _units(_checked(b))).sum(-1).clamp(-1.0, 1.0)


def cos_matrix(features: Sequence[Tensor], *, centre: bool = True) -> Tensor:
    """Returns [L, L] in float64: the mean over samples of `cosines`, for all pairs of layers.

    The diagonal is the share of samples whose feature is not zero: 1, but for degenerate layers.

    Args:
        features: L layers' features [N, D], of the same samples.
        centre: take each layer's mean of all samples away first, as the paper does.

    Raises:
        ExitServeError: there is no layer, the shapes differ or are not [N, D], or some features
            hold NaN or infinity.
    """
    _check_layers(features)
    _check_same("shape", [tuple(layer.shape) for layer in features])
    count, (samples, width) = len(features), features[0].shape
    origins = [_mean(_checked(layer)) * centre for layer in features]
    total = torch.zeros(count, count, dtype=torch.float64, device=features[0].device)
    rows = max(1, _BLOCK_ELEMENTS // (count * width))
    for start in range(0, samples, rows):
        block = [layer[start : start + rows].double() for layer in features]
        units = torch.stack(
            [_units(part - origin) for part, origin in zip(block, origins, strict=True)]
        ).flatten(1)
        # The sum over samples of a sample's cosine is one long dot product.
        total += units @ units.T
    return (total / samples).clamp(-1.0, 1.0)


def cka_matrix(features: Sequence[Tensor]) -> Tensor:
    """Returns [L, L] in float64: linear CKA of all pairs of layers, between 0 and 1.

    Eq. 2, with X and Y the centred features [N, D] of two layers (the paper's H transposed):

        CKA = trace(Y Y^T X X^T) / (|X X^T| |Y Y^T|) = |X^T Y|^2 / (|X^T X| |Y^T Y|)

    with Frobenius norms. The first form is taken where N < D, the second otherwise; it costs
    L (L + 1) / 2 products of 2 N D^2 operations. A layer whose features are all equal has CKA 0
    with all, itself included; any other has CKA 1 with itself.

    Args:
        features: L layers' features [N, D], of the same samples; D may differ between layers.

    Raises:
        ExitServeError: there is no layer, the numbers of samples differ, features are not [N, D],
            or some hold NaN or infinity.
    """
    _check_layers(features)
    samples = features[0].shape[0]
    _check_same("number of samples", [layer.shape[0] for layer in features])
    if samples < max(layer.shape[1] for layer in features):
        products = _by_grams(features)
    else:
        products = _by_covariances(features)
    norms = products.diagonal().sqrt()
    scale = torch.outer(norms, norms)
    return (products / scale.where(scale > 0, 1.0)).clamp(0.0, 1.0)


def nc1(features: Tensor, classes: Tensor) -> float:
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
        classes: integers [N]; those that occur are the K classes.

    Raises:
        ExitServeError: the shapes disagree, features hold NaN or infinity, there is only one
            class, or the means of all classes are equal, where the ratio has no value.
    """
    states = _scaled(centred(features))
    if classes.shape != states.shape[:1]:
        raise ExitServeError(
            f"classes have shape {tuple(classes.shape)}; expected {tuple(states.shape[:1])}, one "
            f"for each sample."
        )
    names, index, counts = torch.unique(
        classes.to(states.device), return_inverse=True, return_counts=True
    )
    count = len(names)
    if count < 2:
        raise ExitServeError(
            f"NC1 compares classes, and all {len(states)} samples are of class "
            f"{int(names[0])}; give samples of at least 2 classes."
        )
    sums = states.new_zeros(count, states.shape[1]).index_add_(0, index, states)
    means = sums / counts[:, None]
    _, lengths, directions = torch.linalg.svd(means / count**0.5, full_matrices=False)
    # As torch.linalg.pinv(S_B) cuts its eigenvalues, lengths^2; and shorter than `rounding`, where
    # the largest entry of the states is 1, is the rounding error of equal means.
    rounding = states.shape[1] * torch.finfo(torch.float64).eps
    kept = (lengths.square() > lengths[0].square() * rounding) & (lengths > rounding)
    if not kept.any():
        raise ExitServeError(
            f"the means of all {count} classes are equal, so NC1 has no value; measure a deeper "
            f"layer, or a token that sees the text."
        )
    spread = (states - means[index]) @ (directions[kept] / lengths[kept, None]).T
    return float(spread.square().sum() / (len(states) * count))


def _by_grams(features: Sequence[Tensor]) -> Tensor:
    """Returns [L, L]: trace(K_l K_m) of the layers' [N, N] products K = X X^T."""
    grams = []
    for layer in features:
        states = _scaled(centred(layer))
        grams.append((states @ states.T).flatten())
    stacked = torch.stack(grams)
    return stacked @ stacked.T


def _by_covariances(features: Sequence[Tensor]) -> Tensor:
    """Returns [L, L]: |X^T Y|^2 of all pairs of layers, two of them in memory at a time."""
    count = len(features)
    products = torch.zeros(count, count, dtype=torch.float64, device=features[0].device)
    for i in range(count):
        x = _scaled(centred(features[i]))
        for j in range(i, count):
            y = x if i == j else _scaled(centred(features[j]))
            products[i, j] = products[j, i] = (x.T @ y).square().sum()
    return products


def _mean(states: Tensor) -> Tensor:
    """Returns the mean [D] of float64 states [N, D]; that of equal ones is exact."""
    return states[0] + (states - states[0]).mean(0)


def _units(vectors: Tensor) -> Tensor:
    """Returns float64 vectors [..., D] divided by their lengths; zero vectors stay zero."""
    return unit_vectors(vectors, _SHORTEST)


def _scaled(states: Tensor) -> Tensor:
    """Returns states divided by their largest entry, so that no power of them overflows."""
    peak = states.abs().amax()
    return states / peak.where(peak > 0, 1.0)


def _checked(features: Tensor) -> Tensor:
    """Returns features in float64.

    Raises:
        ExitServeError: they are not [N, D], or hold NaN or infinity.
    """
    if features.dim() != 2 or features.numel() == 0:
        raise ExitServeError(
            f"features have shape {tuple(features.shape)}; expected [N, D], none of them 0."
        )
    bad = int((~features.isfinite()).any(1).sum())
    if bad:
        raise ExitServeError(
            f"the features of {bad} of {len(features)} samples hold NaN or infinity; only finite "
            f"ones can be measured. Run the model in bfloat16 or float32 if it ran in float16."
        )
    return features.double()


def _check_layers(features: Sequence[Tensor]) -> None:
    """Raises ExitServeError unless there is a layer and every one is [N, D]."""
    if not features:
        raise ExitServeError("no layer's features were given; expected at least 1, [N, D] each.")
    for layer in features:
        if layer.dim() != 2 or layer.numel() == 0:
            _checked(layer)


def _check_same(what: str, values: Sequence[object]) -> None:
    """Raises ExitServeError unless all layers have the same value of something."""
    if len(set(values)) > 1:
        raise ExitServeError(
            f"the {what} differs between layers: {', '.join(map(str, dict.fromkeys(values)))}; "
            f"expected features of the same samples in all."
        )
