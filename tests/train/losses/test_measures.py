"""The measures of spread against their references and values known by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exitserve_training.losses.measures import effective_rank, mean_cosine
from exitserve_training.losses.tokens import unit_vectors

from . import references

# Sums of some dozens of float32 numbers of size 1, in another order than the reference's.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}

MEASURES = {
    "effective_rank": (effective_rank, references.effective_rank),
    "mean_cosine": (mean_cosine, references.mean_cosine),
}


def cloud(rows: int = 2, tokens: int = 7, width: int = 5, seed: int = 0) -> Tensor:
    return torch.randn(rows, tokens, width, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(sorted(MEASURES)),
    tokens=st.integers(1, 9),
    exponent=st.integers(-3, 30),
    seed=st.integers(0, 2**16),
)
def test_any_mask_order_and_scale(name: str, tokens: int, exponent: int, seed: int) -> None:
    measure, reference = MEASURES[name]
    z = cloud(3, tokens, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(3, tokens, generator=generator) < 0.6
    expected = reference(z, mask=mask)
    spoiled = z.masked_fill(~mask[..., None], math.nan)
    torch.testing.assert_close(measure(spoiled, mask=mask), expected, **CLOSE)
    order = torch.randperm(tokens, generator=generator)
    torch.testing.assert_close(measure(z[:, order], mask=mask[:, order]), expected, **CLOSE)
    torch.testing.assert_close(measure(z * 10.0**exponent, mask=mask), expected, **CLOSE)


def test_effective_rank_by_hand() -> None:
    assert effective_rank(torch.eye(6)[None]).item() == pytest.approx(6.0)
    line = torch.outer(torch.tensor([1.0, -2.0, 5.0]), torch.tensor([3.0, 4.0]))[None]
    # The second singular value is a rounding error, 1e-8 of the first.
    assert effective_rank(line).item() == pytest.approx(1.0, abs=1e-5)
    # Singular values 3 and 1: exp of the entropy of (3/4, 1/4).
    expected = math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert effective_rank(torch.diag(torch.tensor([3.0, 1.0]))[None]).item() == pytest.approx(
        expected
    )


def test_mean_cosine_by_hand() -> None:
    assert mean_cosine(torch.ones(1, 4, 3)).item() == pytest.approx(1.0)
    # Each of the paper's N^2 = 16 pairs: the 4 with themselves have cosine 1, the others 0.
    assert mean_cosine(torch.eye(4)[None] * 7).item() == pytest.approx(4 / 16)
    opposite = torch.tensor([[[2.0, 0.0], [-3.0, 0.0]]])
    assert mean_cosine(opposite).item() == pytest.approx(0.0)
    with_zero = torch.tensor([[[2.0, 0.0], [0.0, 0.0]]])
    assert mean_cosine(with_zero).item() == pytest.approx(1 / 4)


def test_unit_vectors_of_short_vectors_are_zero_without_gradient() -> None:
    z = torch.tensor([[0.0, 0.0], [1e-6, 0.0], [3.0, 4.0]], requires_grad=True)
    units = unit_vectors(z)
    assert units.tolist() == [[0.0, 0.0], [0.0, 0.0], pytest.approx([0.6, 0.8])]
    assert unit_vectors(torch.tensor([3e38, 3e38])).tolist() == pytest.approx([2**-0.5] * 2)
    (gradient,) = torch.autograd.grad(units[:, 0].sum(), z)
    assert gradient[:2].count_nonzero() == 0
    # d(x / |z|) = (y^2, -x y) / |z|^3
    assert gradient[2].tolist() == pytest.approx([16 / 125, -12 / 125])
