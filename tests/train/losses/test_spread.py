"""The dispersion losses by hand, and what they do to states."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from exitserve_training.losses import decorrelation, dispersion, mean_cosine, orthogonalization

Loss = Callable[..., Tensor]


def value_and_gradient(loss: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    (gradient,) = torch.autograd.grad(loss, z)
    return loss.detach(), gradient


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_dispersion_by_hand(temperature: float) -> None:
    orthogonal = torch.eye(3)[None]
    assert dispersion(orthogonal, temperature=temperature).item() == pytest.approx(
        -0.5 / temperature
    )
    # Of the 6 pairs of four directions of the plane, 4 are orthogonal and 2 opposite.
    square = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]])
    expected = math.log((4 * math.exp(-0.5 / temperature) + 2 * math.exp(-1 / temperature)) / 6)
    # Cutting the cosine at 1e-6 takes 4.5e-4 from the distance of opposite vectors.
    found = dispersion(square, temperature=temperature).item()
    assert found == pytest.approx(expected, abs=4.6e-4 / temperature)


def test_orthogonalization_by_hand() -> None:
    sixty = torch.tensor([[[1.0, 0.0], [1.0, math.sqrt(3.0)]]])
    assert orthogonalization(sixty).item() == pytest.approx((1 / 2 - 1 / 3) ** 2)
    obtuse = torch.tensor([[[1.0, 0.0], [-1.0, 0.5]]], requires_grad=True)
    value, gradient = value_and_gradient(orthogonalization(obtuse), obtuse)
    assert value.item() == 0.0
    assert gradient.count_nonzero() == 0


def test_decorrelation_of_tokens_by_hand() -> None:
    x = torch.tensor([-1.0, -1.0, 1.0, 1.0])
    y = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    # Of the three pairs (x, 2x + 7), (x, y), (2x + 7, y) the first alone is correlated.
    assert decorrelation(torch.stack([x, 2 * x + 7, y])[None]).item() == pytest.approx(1 / 3)


def descended(loss: Loss, tokens: int, width: int, steps: int) -> tuple[Tensor, float]:
    """A condensed cloud, and the loss, after so many steps down it."""
    generator = torch.Generator().manual_seed(1)
    common = 4.0 * torch.randn(width, generator=generator)
    z = (torch.randn(1, tokens, width, generator=generator) + common).requires_grad_()
    assert mean_cosine(z) > 0.85
    optimizer = torch.optim.Adam([z], lr=0.3)
    value = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(z)
        value.backward()
        optimizer.step()
    return z.detach(), value.item()


def test_dispersion_opens_a_cone() -> None:
    """What the loss is for: descending it lowers the mean cosine of condensed states."""
    assert mean_cosine(descended(dispersion, 24, 8, 40)[0]) < 0.1
