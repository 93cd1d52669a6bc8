"""What tests of kernels share: poisoned allocations, and how far a result may be from the truth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fills what `torch.empty` gives with NaN (integers: with their greatest value).

    A kernel that reads what nobody wrote then shows it. (PyTorch's own switch,
    `torch.utils.deterministic.fill_uninitialized_memory`, which needs deterministic algorithms.)
    """
    switches: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled()
    fill = switches.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    switches.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        switches.fill_uninitialized_memory = fill


def error(result: Tensor, truth: Tensor) -> float:
    """Root-mean-square error relative to the truth's root mean square, both in float64."""
    result, truth = result.double(), truth.double()
    scale = truth.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    return float((result - truth).square().mean().sqrt() / scale)


def assert_no_worse(result: Tensor, plain: Tensor, truth: Tensor, times: float = 2.0) -> None:
    """Asserts that a result errs at most `times` as much as plain PyTorch in the same type.

    Args:
        result: the kernel's.
        plain: PyTorch's, from the same inputs in the same type.
        truth: the reference's, in float64 or float32.
        times: what is allowed; a float32 rounding error is allowed in any case.

    Raises:
        AssertionError: it errs more, or has NaN or infinity elsewhere than the truth.
    """
    assert result.shape == truth.shape, (result.shape, truth.shape)
    finite = truth.isfinite()
    assert torch.equal(result.isnan(), truth.isnan()), "NaN in other places than in the truth"
    assert torch.equal(result.isfinite(), finite), "infinite in other places than the truth"
    if not finite.any():
        return
    floor = torch.finfo(torch.float32).eps
    found = error(result[finite], truth[finite])
    allowed = times * error(plain[finite], truth[finite]) + 4 * floor
    assert found <= allowed, f"error {found:.3g}, plain PyTorch's times {times} is {allowed:.3g}"
