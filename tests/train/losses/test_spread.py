"""What the dispersion losses are for; `table.py` compares their values."""

import pytest
import torch

from exitserve.errors import ExitServeError
from exitserve_training.losses import dispersion, mean_cosine


def test_dispersion_opens_a_cone() -> None:
    """Descending the loss lowers the mean cosine of condensed states."""
    generator = torch.Generator().manual_seed(1)
    common = 4.0 * torch.randn(8, generator=generator)
    z = (torch.randn(1, 24, 8, generator=generator) + common).requires_grad_()
    assert mean_cosine(z) > 0.85
    optimizer = torch.optim.Adam([z], lr=0.3)
    for _ in range(40):
        optimizer.zero_grad()
        dispersion(z).backward()
        optimizer.step()
    assert mean_cosine(z) < 0.1


@pytest.mark.parametrize("shape", [(4, 8), (0, 4, 8)])
def test_states_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ExitServeError, match="expected"):
        dispersion(torch.ones(shape))
