"""What the cosine alignment of layers keeps; `table.py` compares it with its reference."""

import torch
from torch import Tensor

from exitserve_training.losses import cosine_alignment


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
