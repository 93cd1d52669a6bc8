"""What the NITP loss trains; `table.py` compares it with its reference."""

import torch

from exitserve_training.losses.implicit import Projector, nitp


def test_targets_get_no_gradient() -> None:
    hidden, shallow = (torch.randn(2, 6, 5, requires_grad=True) for _ in range(2))
    nitp(hidden, shallow, Projector(5)).backward()
    assert shallow.grad is None
    assert hidden.grad is not None
    assert hidden.grad[:, -1].count_nonzero() == 0, "the last position predicts nothing"
    assert hidden.grad[:, :-1].count_nonzero() > 0
