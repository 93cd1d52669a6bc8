"""IF nodes in CUDA graphs for a PyTorch without them, by CUDA's Python bindings.

Exits that the device decides lie in IF nodes, which `torch.cuda.CUDAGraph` knows from 2.13 on. That
is what vLLM comes with; but a vLLM that was packed for a machine without a network runs on the
PyTorch that is there. `install` gives an older one the calls that
`exitserve.engine.layers.branches` makes. Tables say where they came from.

Read from NVIDIA's programming guide, "Conditional graph nodes". A body may hold kernels, copies,
fills and further conditional nodes.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

import torch

HANDLE_SETTER = """
extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(
    unsigned long long handle, unsigned int value);
extern "C" __global__ void set_handle(unsigned long long handle, const bool *flag)
{ cudaGraphSetConditional(handle, *flag); }
"""
"""What a flag means for a node can be said on the device alone."""


def are_missing() -> bool:
    """Whether this PyTorch, built for CUDA, has no IF nodes."""
    return torch.version.cuda is not None and not hasattr(
        torch.cuda.CUDAGraph, "begin_capture_to_if_node"
    )


def install() -> None:
    """Gives `torch.cuda.CUDAGraph` IF nodes, where it has none."""
    if not are_missing():
        return
    nodes = _Nodes()
    graph: Any = torch.cuda.CUDAGraph
    graph.get_currently_capturing_graph = staticmethod(lambda: nodes)
    graph.begin_capture_to_if_node = lambda _, flag: nodes.begin_capture_to_if_node(flag)
    graph.end_capture_to_conditional_node = lambda _: nodes.end_capture_to_conditional_node()


class _Nodes:
    """The branches that are open in the graph that is being captured."""

    def __init__(self) -> None:
        self._function: Any = None
        self._pool: Any = None
        self._streams: list[torch.cuda.Stream] = []
        """By how many branches lie around one's body."""
        self._around: list[torch.cuda.Stream] = []

    def begin_capture_to_if_node(self, flag: torch.Tensor) -> None:
        """From now on the current stream is captured to the body of a node."""
        from cuda.bindings import driver

        if self._function is None:
            self._function = _compiled()
            self._pool = torch.cuda.MemPool()
        depth = len(self._around)
        if depth == len(self._streams):
            # Not one of PyTorch's, which others could have been given too.
            (made,) = _checked(driver.cuStreamCreate(1))
            self._streams.append(torch.cuda.ExternalStream(int(made)))  # type: ignore[no-untyped-call]
        around = torch.cuda.current_stream()
        stream = driver.CUstream(around.cuda_stream)
        graph = _captured(stream)[0]
        (context,) = _checked(driver.cuCtxGetCurrent())
        (handle,) = _checked(driver.cuGraphConditionalHandleCreate(graph, context, 0, 0))
        arguments = (
            (int(handle), flag.data_ptr()),
            (ctypes.c_ulonglong, ctypes.c_void_p),
        )
        one = (1, 1, 1)
        _checked(driver.cuLaunchKernel(self._function, *one, *one, 0, stream, arguments, 0))

        graph, dependencies, edges = _captured(stream)
        wanted = driver.CUgraphNodeParams()
        wanted.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        wanted.conditional.handle = handle
        wanted.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF
        wanted.conditional.size = 1
        wanted.conditional.ctx = context
        (node,) = _checked(
            driver.cuGraphAddNode(graph, dependencies, edges, len(dependencies), wanted)
        )
        body = wanted.conditional.phGraph_out[0]
        replace = driver.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
        _checked(
            driver.cuStreamUpdateCaptureDependencies(
                stream, [node], [driver.CUgraphEdgeData()], 1, replace
            )
        )
        inner = self._streams[depth]
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        _checked(
            driver.cuStreamBeginCaptureToGraph(
                driver.CUstream(inner.cuda_stream), body, None, None, 0, mode
            )
        )
        self._around.append(around)
        torch.cuda.set_stream(inner)
        if depth == 0:  # the graph's own pool takes what its own stream asks for alone
            torch._C._cuda_beginAllocateCurrentThreadToPool(inner.device_index, self._pool.id)

    def end_capture_to_conditional_node(self) -> None:
        """Ends the body that was begun last."""
        from cuda.bindings import driver

        inner = torch.cuda.current_stream()
        torch.cuda.set_stream(self._around.pop())
        if not self._around:
            torch._C._cuda_endAllocateToPool(inner.device_index, self._pool.id)
        _checked(driver.cuStreamEndCapture(driver.CUstream(inner.cuda_stream)))


def _captured(stream: Any) -> tuple[Any, list[Any], list[Any]]:
    """The graph that a stream is captured to, and what its next node comes after."""
    from cuda.bindings import driver

    status, _, graph, dependencies, edges, _ = _checked(driver.cuStreamGetCaptureInfo(stream))
    assert status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE, status
    dependencies = list(dependencies)
    if not edges:
        edges = [driver.CUgraphEdgeData() for _ in dependencies]
    return graph, dependencies, list(edges)


def _compiled() -> Any:
    """The kernel that tells a node its flag."""
    from cuda.bindings import driver

    code = setter_code()
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    (before,) = _checked(driver.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        (module,) = _checked(driver.cuModuleLoadData(code))
        (function,) = _checked(driver.cuModuleGetFunction(module, b"set_handle"))
    finally:
        with suppress(RuntimeError):
            _checked(driver.cuThreadExchangeStreamCaptureMode(before))
    return function


def setter_code() -> bytes:
    """`HANDLE_SETTER` as PTX, which the driver compiles."""
    from cuda.bindings import nvrtc

    (program,) = _checked(nvrtc.nvrtcCreateProgram(HANDLE_SETTER.encode(), b"set.cu", 0, [], []))
    options = [b"--gpu-architecture=compute_80"]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if result.value:
        (size,) = _checked(nvrtc.nvrtcGetProgramLogSize(program))
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.decode())
    (size,) = _checked(nvrtc.nvrtcGetPTXSize(program))
    code: bytes = b" " * size
    _checked(nvrtc.nvrtcGetPTX(program, code))
    return code


def _checked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call gave; raises `RuntimeError` if it failed."""
    error, *given = answer
    if error.value:
        raise RuntimeError(f"CUDA says {error!r}")
    return tuple(given)
