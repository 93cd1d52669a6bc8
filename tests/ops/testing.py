"""Helpers of the kernels' tests: poisoned allocations, and errors against the reference."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fills tensors of `torch.empty` with NaN (integers: with the greatest value).

    So a kernel that reads uninitialised memory is found. Uses PyTorch's
    `torch.utils.deterministic.fill_uninitialized_memory`, which needs deterministic algorithms.
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
    """Root-mean-square error relative to the root mean square of `truth`, in float64."""
    result, truth = result.double(), truth.double()
    scale = truth.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    return float((result - truth).square().mean().sqrt() / scale)


def assert_no_worse(result: Tensor, plain: Tensor, truth: Tensor, times: float = 2.0) -> None:
    """Asserts that a result's error is at most `times` that of PyTorch in the same type.

    Args:
        result: of the kernel.
        plain: of PyTorch, from the same inputs in the same type.
        truth: of the reference, in float64 or float32.
        times: the limit; a float32 rounding error is always allowed.

    Raises:
        AssertionError: the error is larger, or NaN or infinity are in other places.
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
