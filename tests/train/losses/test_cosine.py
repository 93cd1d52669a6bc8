"""The cosine alignment of layers by hand, and what it keeps."""

import math

import pytest
import torch
from torch import Tensor

from exitserve_training.losses import cosine_alignment


def test_cosine_by_hand() -> None:
    """L = 2: lambda_1 = 1/3 times 1 - cos 60 degrees; the last layer's own term is 0."""
    first = torch.tensor([[[1.0, math.sqrt(3.0)]]])
    last = torch.tensor([[[5.0, 0.0]]])

    def loss(first: Tensor, last: Tensor) -> float:
        return cosine_alignment({1: first, 2: last}, {1: 1 / 3, 2: 2 / 3}).item()

    assert loss(first, last) == pytest.approx(1 / 6, rel=1e-6)
    assert loss(last, 0.1 * last) == pytest.approx(0.0, abs=1e-7)
    assert loss(-last, last) == pytest.approx(2 / 3, rel=1e-6)


def test_cosine_keeps_the_states_and_no_copies_of_them() -> None:
    """The memory claim: between forward and backward only what was given is held."""
    hidden = {
        layer: torch.randn(2, 5, 6, dtype=torch.bfloat16).requires_grad_() for layer in range(1, 5)
    }
    held = {states.data_ptr() for states in hidden.values()}
    copies: list[Tensor] = []

    def seen(tensor: Tensor) -> Tensor:
        if tensor.numel() >= hidden[1].numel() and tensor.data_ptr() not in held:
            copies.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        loss = cosine_alignment(hidden, dict.fromkeys(hidden, 0.25))
    assert not copies
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(states.grad is not None for states in hidden.values()), "the last layer learns too"
