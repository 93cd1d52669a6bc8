"""The measures of inspections against literal formulas and values known by hand.

N samples, D hidden, L layers.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from exitserve.errors import ExitServeError
from exitserve_training.inspect import condensation
from exitserve_training.inspect.condensation import Condensation, trend
from exitserve_training.inspect.generation import diversity
from exitserve_training.inspect.probe import minimal_depth
from exitserve_training.inspect.similarity import centred, cka_matrix, cos_matrix, cosines, nc1
from exitserve_training.losses import mean_cosine

# Sums of some thousands of float64 numbers of size 1, in another order.
EXACT = {"rtol": 1e-10, "atol": 1e-12}
# Of float32 ones, the type in which cosines of tokens are computed.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def cloud(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layers(count: int = 4, samples: int = 30, width: int = 6, seed: int = 0) -> list[Tensor]:
    """Features that drift from layer to layer, far from the origin."""
    return list(cloud(count, samples, width, seed=seed).cumsum(0) + 3)


def cka_by_grams(x: Tensor, y: Tensor) -> float:
    """Eq. 2, word by word: H^T H are the [N, N] products, H H^T the [D, D] ones."""
    x, y = (z.double() - z.double().mean(0) for z in (x, y))
    top = torch.trace(y @ y.T @ x @ x.T)
    return float(top / (torch.linalg.norm(x.T @ x) * torch.linalg.norm(y.T @ y)))


def nc1_by_loops(features: Tensor, classes: Tensor) -> float:
    states = features.double()
    width, names = states.shape[1], classes.unique().tolist()
    middle = states.mean(0)
    within = torch.zeros(width, width, dtype=torch.float64)
    between = torch.zeros(width, width, dtype=torch.float64)
    for name in names:
        members = states[classes == name]
        mean = members.mean(0)
        for member in members:
            within += torch.outer(member - mean, member - mean) / len(states)
        between += torch.outer(mean - middle, mean - middle) / len(names)
    # As rank K - 1: what rounding adds to the other eigenvalues is no variability.
    inverse = torch.linalg.pinv(between, hermitian=True, rtol=1e-10)
    return float(torch.trace(within @ inverse)) / len(names)


def test_cos_matrix_is_the_mean_of_cosines() -> None:
    features = layers()
    prepared = [centred(layer) for layer in features]
    expected = torch.stack(
        [torch.stack([cosines(a, b).mean() for b in prepared]) for a in prepared]
    )
    torch.testing.assert_close(cos_matrix(features), expected, **EXACT)


@pytest.mark.parametrize(("samples", "width"), [(30, 6), (6, 30), (7, 7), (2, 1)])
def test_cka_equals_the_formula_of_gram_matrices(samples: int, width: int) -> None:
    features = layers(3, samples, width)
    expected = [[cka_by_grams(x, y) for y in features] for x in features]
    torch.testing.assert_close(
        cka_matrix(features), torch.tensor(expected, dtype=torch.float64), **EXACT
    )


@pytest.mark.parametrize(("samples", "width"), [(40, 6), (40, 2), (8, 30)])
def test_nc1_equals_the_loops(samples: int, width: int) -> None:
    classes = torch.arange(samples) % 4
    # So that classes differ in size, and their names are not 0, 1, 2, ...
    classes[: samples // 4] = 7
    features = cloud(samples, width) + cloud(8, width, seed=1)[classes]
    assert nc1(features, classes) == pytest.approx(nc1_by_loops(features, classes), rel=1e-8)
    assert nc1(features * 1e30, classes) == pytest.approx(nc1(features, classes), rel=1e-5)


def measured(states: Tensor, mask: Tensor | None = None) -> Condensation:
    found = Condensation([1])
    found.add(1, states, mask)
    return found


@pytest.mark.parametrize("block", [1, 20, 2**22])
def test_condensation_equals_literal_pairs(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(condensation, "_BLOCK_ELEMENTS", block)
    states = cloud(3, 9, 5) + 0.5
    mask = torch.rand(3, 9, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[2] = False
    histograms = []
    for row, real in zip(states, mask, strict=True):
        pairs = [
            float(torch.cosine_similarity(a.double(), b.double(), dim=0).clamp(-1, 1))
            for a, b in itertools.product(row[real], repeat=2)
        ]
        if pairs:
            histograms.append(np.histogram(pairs, condensation.BINS, (-1.0, 1.0))[0] / len(pairs))
    found = measured(states.masked_fill(~mask[..., None], math.nan), mask)
    np.testing.assert_allclose(found.histograms()[0], np.mean(histograms, 0), atol=1e-12)
    expected = mean_cosine(states, mask=mask)
    torch.testing.assert_close(torch.tensor(found.means()[1]), expected, **CLOSE)


def test_a_trend_is_one_where_means_only_grow() -> None:
    assert trend({3: 0.4, 1: 0.1, 2: 0.2}) == pytest.approx((1.0, 1.0))
    assert trend({1: 0.4, 2: 0.3, 3: 0.3}) == pytest.approx((-(0.75**0.5), -((2 / 3) ** 0.5)))


def test_minimal_depth() -> None:
    accuracies = {6: 0.8, 2: 0.5, 4: 0.77, 5: 0.7}
    # Depth 4 reaches 0.76, though depth 5 falls below again.
    assert minimal_depth(accuracies, 0.95) == 4
    assert minimal_depth(accuracies, 1.0) == 6
    assert minimal_depth(accuracies, 0.5) == 2
    assert minimal_depth({1: 0.07, 2: 0.1}, 0.7) == 1
    assert minimal_depth({1: 0.0, 2: 0.0}, 1.0) == 1


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], 0.0),
        ([5], 1.0),
        ([5, 5], 1.0),
        ([1, 2, 3, 4, 5], 1.0),
        # 12 23 31 12 23 / 123 231 312 123 / 1231 2312 3123
        ([1, 2, 3, 1, 2, 3], 3 / 5 * 3 / 4 * 3 / 3),
        ([7] * 5, 1 / 4 * 1 / 3 * 1 / 2),
        ([7] * 3, 1 / 2 * 1 / 1),
    ],
)
def test_diversity_by_hand(tokens: list[int], expected: float) -> None:
    assert diversity(tokens) == pytest.approx(expected)


def test_states_that_are_not_finite_are_counted() -> None:
    with pytest.raises(ExitServeError, match="states of 1 of 2 tokens at depth 1"):
        measured(torch.tensor([[[1.0, math.nan], [0.0, 1.0]]]))
