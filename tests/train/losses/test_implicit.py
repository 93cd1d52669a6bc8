"""The NITP loss by hand; `table.py` compares it with its reference."""

from typing import Any

import pytest
import torch
from torch import nn

from exitserve_training.losses.implicit import Projector, nitp


def test_by_hand() -> None:
    """Two positions: the first predicts the second's shallow state, which no one predicts back."""
    hidden = torch.tensor([[[3.0, 4.0], [9.0, 9.0]]])
    shallow = torch.tensor([[[7.0, 7.0], [4.0, 3.0]]])

    def loss(distance: Any) -> float:
        return nitp(hidden, shallow, lambda states: states, distance=distance).item()

    assert loss("cosine") == pytest.approx(1 - 24 / 25)
    assert loss("mse") == pytest.approx(1.0)
    assert nitp(hidden, shallow, nn.Identity(), target_shift=2).item() == 0.0, "no such pair"


def test_targets_get_no_gradient() -> None:
    hidden, shallow = (torch.randn(2, 6, 5, requires_grad=True) for _ in range(2))
    nitp(hidden, shallow, Projector(5)).backward()
    assert shallow.grad is None
    assert hidden.grad is not None
    assert hidden.grad[:, -1].count_nonzero() == 0, "the last position predicts nothing"
    assert hidden.grad[:, :-1].count_nonzero() > 0
