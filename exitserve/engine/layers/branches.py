"""Branches that the device decides, inside CUDA graphs and outside."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_EVERY: ContextVar[bool] = ContextVar("exitserve every branch", default=False)


def when(flag: Tensor, body: Callable[[], None]) -> None:
    """Runs `body` where `flag` holds.

    A CUDA graph is recorded once and replayed without Python. While one is captured, the body
    becomes the body of an IF node (CUDA 12.4; PyTorch 2.13, `CUDAGraph.begin_capture_to_if_node`),
    and each replay reads the flag on the device. Else the host reads it, and waits for it.

    Args:
        flag: [] bool.
        body: writes into tensors that were there before; others that it makes are lost.
    """
    if is_captured(flag):
        graph: Any = torch.cuda.CUDAGraph.get_currently_capturing_graph()
        around = torch.cuda.current_stream()
        graph.begin_capture_to_if_node(flag)
        try:
            # The body is captured on a stream of its own. vLLM's collectives go to the one that was
            # set last (`current_stream` in `vllm/utils/torch_utils.py`).
            torch.cuda.set_stream(torch.cuda.current_stream())
            body()
        finally:
            graph.end_capture_to_conditional_node()
            torch.cuda.set_stream(around)
    elif _EVERY.get() or bool(flag):
        body()


def is_captured(flag: Tensor) -> bool:
    """Whether a graph is being captured on the flag's device."""
    return flag.is_cuda and torch.cuda.is_current_stream_capturing()


@contextmanager
def every_branch() -> Iterator[None]:
    """Runs all bodies, whatever their flags: warms up what a graph is to hold."""
    token = _EVERY.set(True)
    try:
        yield
    finally:
        _EVERY.reset(token)


def can_branch_in_graphs() -> bool:
    """Whether `when` works inside CUDA graphs here."""
    return hasattr(torch.cuda.CUDAGraph, "begin_capture_to_if_node")
