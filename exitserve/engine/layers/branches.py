"""Branches that the device decides, inside CUDA graphs and outside."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_EVERY: ContextVar[bool] = ContextVar("exitserve every branch", default=False)
_DEPTH: ContextVar[int] = ContextVar("exitserve bodies around this one", default=0)
_BODIES: list[Any] = []
"""The streams on which bodies are captured, by how many are around them."""


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
            with _on_a_stream_that_stays():
                body()
        finally:
            graph.end_capture_to_conditional_node()
            torch.cuda.set_stream(around)
    elif _EVERY.get() or bool(flag):
        body()


@contextmanager
def _on_a_stream_that_stays() -> Iterator[None]:
    """Captures a body on a stream of ours: later bodies get what was let go on it again.

    PyTorch's stream of a body ends with it, and so does the use of what the allocator and cuBLAS
    keep for it, 32 MiB and more on an H100: over all bodies of all graphs that adds up. vLLM's
    collectives go to the stream that was set last (`current_stream` in
    `vllm/utils/torch_utils.py`).
    """
    fresh, depth = torch.cuda.current_stream(), _DEPTH.get()
    # PyTorch has 32 of its own and hands them out in turn: one may lie around this body.
    while depth == len(_BODIES) or _is_capturing(_BODIES[depth]):
        _BODIES[depth : depth + 1] = [torch.cuda.Stream()]  # type: ignore[no-untyped-call]
    kept = _BODIES[depth]
    kept.wait_stream(fresh)
    token = _DEPTH.set(depth + 1)
    torch.cuda.set_stream(kept)
    try:
        yield
    finally:
        _DEPTH.reset(token)
        torch.cuda.set_stream(fresh)
        fresh.wait_stream(kept)


def _is_capturing(stream: Any) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


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
