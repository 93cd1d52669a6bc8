"""Operations inside `torch.compile`: the same numbers."""

import pytest
import torch

from exitserve_kernels.dispatch import Form
from exitserve_kernels.exit_check import Head, finish, summarise_slice
from exitserve_kernels.propagate_kv import Caches, KeyNorm, Rotary, fill


@pytest.fixture
def form(device: torch.device) -> Form:
    """On a GPU the kernels; the compiler makes nothing of the interpreter's."""
    return "triton" if device.type == "cuda" else "torch"


def test_exit_check(device: torch.device, form: Form) -> None:
    weight, thresholds = torch.randn(300, 32, device=device), torch.rand(4, device=device)

    def check(states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        summary = summarise_slice(states * 2.0, Head(weight), implementation=form)
        return finish(summary[:, None], thresholds, vocab_size=300, implementation=form)

    states = torch.randn(4, 32, device=device)
    for one, other in zip(torch.compile(check, fullgraph=True)(states), check(states), strict=True):
        # Compiled sums run in another order.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_propagate_kv(device: torch.device, form: Form) -> None:
    options = {
        "key_norm": KeyNorm(torch.rand(2, 8, device=device), 1e-5),
        "rotary": Rotary([torch.rand(10, 8, device=device)] * 2),
    }
    positions, slots = torch.tensor([1, 5, 7]), torch.tensor([0, 9, 2])
    projected = torch.randn(3, 2, 2, 16, device=device)
    filled = []
    for compiled in (False, True):
        caches = Caches(*(list(torch.zeros(2, 4, 4, 2, 8, device=device)) for _ in range(2)))

        def write(projected: torch.Tensor, caches: Caches = caches) -> None:
            fill(
                projected * 2.0,
                positions.to(device),
                slots.to(device),
                caches,
                implementation=form,
                **options,
            )

        (torch.compile(write) if compiled else write)(projected)
        filled.append([*caches.keys, *caches.values])
    for one, other in zip(*filled, strict=True):
        assert one.count_nonzero()
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
