"""The NITP loss against the position-by-position reference that it must equal."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from exitserve_training.losses.implicit import Projector, nitp

from .references import nitp as reference

# Both sides are float32 and differ in the order of sums of a few dozen terms: some 1e-7 each.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}

DISTANCES = ["cosine", "mse"]


def problem(
    rows: int = 2, tokens: int = 6, width: int = 5, *, seed: int = 0, dtype: Any = torch.float32
) -> tuple[Tensor, Tensor, Projector]:
    torch.manual_seed(seed)
    hidden = torch.randn(rows, tokens, width, dtype=dtype, requires_grad=True)
    shallow = torch.randn(rows, tokens, width, dtype=dtype, requires_grad=True)
    return hidden, shallow, Projector(width).to(dtype)


def some_mask(rows: int, tokens: int, seed: int) -> Tensor:
    return torch.rand(rows, tokens, generator=torch.Generator().manual_seed(seed)) < 0.7


def gradients(loss: Tensor, hidden: Tensor, projector: nn.Module) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, [hidden, *projector.parameters()])


def test_by_hand() -> None:
    """Two positions: the first predicts the second's shallow state, which no one predicts back."""
    hidden = torch.tensor([[[3.0, 4.0], [9.0, 9.0]]])
    shallow = torch.tensor([[[7.0, 7.0], [4.0, 3.0]]])

    def loss(distance: Any) -> float:
        return nitp(hidden, shallow, lambda states: states, distance=distance).item()

    assert loss("cosine") == pytest.approx(1 - 24 / 25)
    assert loss("mse") == pytest.approx(1.0)


def test_targets_get_no_gradient() -> None:
    hidden, shallow, projector = problem()
    nitp(hidden, shallow, projector).backward()
    assert shallow.grad is None
    assert hidden.grad is not None
    assert hidden.grad[:, -1].count_nonzero() == 0, "the last position predicts nothing"
    assert hidden.grad[:, :-1].count_nonzero() > 0


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(1, 9),
    target_shift=st.integers(0, 4),
    distance=st.sampled_from(DISTANCES),
    seed=st.integers(0, 2**16),
)
def test_a_pair_counts_if_both_positions_do(
    tokens: int, target_shift: int, distance: Any, seed: int
) -> None:
    hidden, shallow, projector = problem(3, tokens, seed=seed)
    mask = some_mask(3, tokens, seed)
    expected = reference(hidden, shallow, projector, target_shift, distance, mask)
    # Uncounted positions may hold anything.
    spoiled = hidden.detach().masked_fill(~mask[..., None], math.nan).requires_grad_()
    shallow = shallow.detach().masked_fill(~mask[..., None], math.nan)
    options: dict[str, Any] = {"target_shift": target_shift, "distance": distance, "mask": mask}
    loss = nitp(spoiled, shallow, projector, **options)
    torch.testing.assert_close(loss, expected, **CLOSE)
    assert all(gradient.isfinite().all() for gradient in gradients(loss, spoiled, projector))


def test_projector_maps_states_to_states() -> None:
    projector = Projector(6)
    assert projector(torch.randn(3, 6)).shape == (3, 6)
    assert [tuple(p.shape) for p in projector.parameters()] == [(6, 6), (6, 6)]
