"""Times the parts of a decode step on this machine, on matrices of the model's shapes.

Weights are invented, in the serving type, and packed by oneDNN (as in vLLM's linear layers on a
CPU; measured equal within noise). There are enough layers of them to exceed the processor's caches,
as a model does. A part runs as the engine runs it:

    layer   norm, Q/K/V, rotation, output, norm, feed-forward block
    cache   attention over `context` keys
    head    norm, LM head
    check   the same with the exit rows of the head, then the confidence of their logits
    fill    norm, one product for the keys and values of many layers, rotation

All parts at all numbers of rows are timed in turn, round after round, and the least time of each
counts: other processes can only add to it. The engine's own work in Python is not timed; it is a
constant that was measured once.

Shapes: B rows, D hidden, F feed-forward, H heads, K kv heads, P head size, V vocabulary, C context.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from exitserve.costs.byte_costs import DecoderShape
from exitserve.costs.curves import Curve, StepCosts
from exitserve.costs.devices import ENGINE_SECONDS
from exitserve.errors import ExitServeError
from exitserve.reporting.report import machine
from exitserve_kernels.exit_check import check_logits

SECONDS = 4.0
"""Time for all rounds, if the fewest rounds do not take longer."""
ROUNDS = range(8, 61)
BEYOND_CACHES = 256 * 2**20
"""Bytes of weights that exceed a core's share of any processor cache."""
CACHE_ROOM = 2**30
"""Most bytes of keys and values; beyond that, layers share them."""
UNSTEADY = 1.25
"""From this ratio of median to least time, the machine was too busy to trust the result."""

EXITS_SECONDS = 0.25e-3, 0.05e-3
"""As `ENGINE_SECONDS`: what exits add (calls, norms, small copies, recording), from profiles of the
engine (`benchmarks/profile_step.py`)."""

Work = Callable[[], object]


def time_step(
    shape: DecoderShape,
    dtype: str,
    rows: Sequence[int],
    context: int,
    progress: Callable[[float], None] = lambda done: None,
) -> tuple[StepCosts, dict[str, Any]]:
    """Times the parts of a step.

    Args:
        shape: the decoder.
        dtype: of weights and cache.
        rows: numbers of rows at which to time them, ascending from 1.
        context: tokens that each row's attention reads.
        progress: called with the share that is done, 0..1.

    Returns:
        The costs, and how far to trust them: `bandwidth` of the memory (bytes a second), `threads`
        that computed (0 on a GPU), `rounds`, and `unsteadiness`, the median over the least time of
        the least steady part.

    Raises:
        ExitServeError: the weights to be timed do not fit into free memory.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _check_memory(shape, max(rows), context, device)
    with _threads(device) as threads, torch.inference_mode():
        timer = _graph_timer if device.type == "cuda" else partial(_timer, threads=threads)
        parts = _StepParts(shape, getattr(torch, dtype), device, max(rows), context)
        work_by_part = {
            (name, count): timer(work)
            for count in rows
            for name, work in parts.work_by_part(count).items()
        }
        work_by_part["read", 1] = timer(parts.read)
        times = _rounds(work_by_part, progress)
    least = {key: min(found) for key, found in times.items()}
    on_cpu = device.type == "cpu"

    def curve(*names: str, share: int = 1) -> Curve:
        return Curve(tuple((n, sum(least[name, n] for name in names) / share) for n in rows))

    def constant(first: float, more: float) -> Curve:
        # On a GPU passes are scheduled ahead, and exits are decided inside the graph.
        return Curve(tuple((n, (first + (n - 1) * more) * on_cpu) for n in rows))

    costs = StepCosts(
        num_layers=shape.num_layers,
        matrices=curve(*parts.layer_names, share=len(parts.layer_names)),
        attention=curve(*parts.cache_names, share=len(parts.cache_names)),
        fill=curve("fill", share=parts.filled),
        check=curve("rows" if shape.exit_rows else "head", "confidence"),
        head=curve("head"),
        rest=constant(*ENGINE_SECONDS),
        exits=constant(*EXITS_SECONDS),
    )
    return costs, {
        "bandwidth": parts.read_bytes / least["read", 1],
        "threads": threads if on_cpu else 0,
        "rounds": len(times["read", 1]),
        "unsteadiness": max(statistics.median(times[key]) / least[key] for key in times),
    }


def _rounds(
    work_by_part: Mapping[tuple[str, int], Callable[[], float]], progress: Callable[[float], None]
) -> dict[tuple[str, int], list[float]]:
    """Seconds of every part in every round; a first one warms up."""
    times: dict[tuple[str, int], list[float]] = {key: [] for key in work_by_part}
    for work in work_by_part.values():
        work()
    start = time.perf_counter()
    for done in range(ROUNDS.stop - 1):
        elapsed = time.perf_counter() - start
        if done >= ROUNDS.start and elapsed > SECONDS:
            break
        progress(min(elapsed / SECONDS, done / ROUNDS.start, 1.0))
        for key, work in work_by_part.items():
            times[key].append(work())
    progress(1.0)
    return times


class _StepParts:
    """Invented weights, and the work to be timed on them."""

    def __init__(
        self,
        shape: DecoderShape,
        dtype: torch.dtype,
        device: torch.device,
        most_rows: int,
        context: int,
    ) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._context = max(1, context)
        self._heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
        heads, kv_heads, size = self._heads
        hidden, width = shape.hidden_size, shape.intermediate_size
        copies, self.filled, caches = _copies(shape, most_rows, self._context)

        def linear(out: int, into: int) -> Callable[[Tensor], Tensor]:
            return _linear(self._full(out, into), most_rows)

        self._layers = [
            (
                linear((heads + 2 * kv_heads) * size, hidden),
                linear(hidden, heads * size),
                linear((shape.feed_forward_matrices - 1) * width, hidden),
                linear(hidden, width),
            )
            for _ in range(copies)
        ]
        self.layer_names = [f"layer {index}" for index in range(copies)]
        self._head = linear(shape.vocab_size, hidden)
        self._exit_rows = shape.exit_rows or shape.vocab_size
        self._rows = linear(self._exit_rows, hidden) if shape.exit_rows else self._head
        self._fill = linear(self.filled * 2 * kv_heads * size, hidden)
        self._caches = [
            self._full(2, most_rows * kv_heads, self._context, size) for _ in range(caches)
        ]
        self.cache_names = [f"cache {index}" for index in range(caches)]
        self._gain = self._full(hidden)
        self._memory = torch.ones(BEYOND_CACHES // 4, device=device)
        self.read_bytes = BEYOND_CACHES

    def _full(self, *sizes: int) -> Tensor:
        return torch.full(sizes, 0.01, dtype=self._dtype, device=self._device)

    def work_by_part(self, rows: int) -> dict[str, Work]:
        """What to time for a number of rows, by the name of the part."""
        heads, _, size = self._heads
        state = self._full(rows, self._shape.hidden_size)
        queries = self._full(rows, heads * size)
        logits = self._full(rows, self._exit_rows)
        never = torch.ones(rows, device=self._device)
        return {
            **{
                name: partial(self._run_layer, index, state)
                for index, name in enumerate(self.layer_names)
            },
            **{
                name: partial(self._attend, index, queries)
                for index, name in enumerate(self.cache_names)
            },
            "head": lambda: self._head(self._norm(state)),
            "rows": lambda: self._rows(self._norm(state)),
            "confidence": lambda: check_logits(logits, never),
            "fill": lambda: self._run_fill(state),
        }

    def read(self) -> Tensor:
        """Reads `read_bytes` of memory."""
        return self._memory.sum()

    def _norm(self, state: Tensor) -> Tensor:
        return functional.rms_norm(state, state.shape[-1:], self._gain)

    def _run_layer(self, index: int, state: Tensor) -> Tensor:
        heads, kv_heads, size = self._heads
        qkv, out, up, down = self._layers[index]
        projected = qkv(self._norm(state))
        queries = _rotated(projected[:, : heads * size])
        _rotated(projected[:, heads * size : (heads + kv_heads) * size])
        state = state + out(queries)
        wide = up(self._norm(state))
        if self._shape.feed_forward_matrices == 3:
            gate, wide = wide.chunk(2, dim=-1)
            wide = functional.silu(gate) * wide
        else:
            wide = functional.gelu(wide)
        return state + down(wide)

    def _attend(self, index: int, queries: Tensor) -> Tensor:
        """Queries [B, H * P] over a cache [2, B * K, C, P]; the heads of a group share it."""
        heads, kv_heads, size = self._heads
        keys, values = self._caches[index][:, : len(queries) * kv_heads]
        grouped = queries.view(len(keys), heads // kv_heads, size)
        if self._device.type == "cuda":
            return functional.scaled_dot_product_attention(grouped, keys, values)
        # For one query much faster than PyTorch's fused attention, and as fast as vLLM's.
        scores = torch.bmm(grouped, keys.transpose(1, 2)).softmax(dim=-1)
        return torch.bmm(scores, values)

    def _run_fill(self, state: Tensor) -> Tensor:
        _, kv_heads, size = self._heads
        filled = self._fill(self._norm(state)).view(len(state), self.filled, 2, kv_heads * size)
        _rotated(filled[:, :, 0])
        return filled.transpose(0, 1).contiguous()  # the write, layer by layer


def _rotated(vectors: Tensor) -> Tensor:
    """Two multiplications and a sum, as a rotary embedding does."""
    return torch.addcmul(vectors * 0.8, vectors, vectors.new_tensor(0.6))


def _linear(weight: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
    """A product [B, D] to [B, K] with `weight` [K, D], packed for the CPU where oneDNN can."""
    if weight.device.type == "cpu" and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
            run = torch.ops.mkldnn._linear_pointwise
            run(weight[:1, :], packed, None, "none", [], "")
        except RuntimeError:  # a type that oneDNN has no kernels for on this machine
            pass
        else:
            return lambda x: run(x, packed, None, "none", [], "")
    return lambda x: functional.linear(x, weight)


def _copies(shape: DecoderShape, rows: int, context: int) -> tuple[int, int, int]:
    """How many layers, layers of K/V weights, and key-value caches to make."""
    cache = rows * context * shape.kv_token_bytes
    layers = min(shape.num_layers, -(-BEYOND_CACHES // shape.layer_bytes))
    filled = min(shape.num_layers, max(1, BEYOND_CACHES // shape.kv_projection_bytes))
    return layers, filled, max(1, min(layers, CACHE_ROOM // cache))


def _check_memory(shape: DecoderShape, rows: int, context: int, device: torch.device) -> None:
    layers, filled, caches = _copies(shape, rows, max(1, context))
    needed = layers * shape.layer_bytes + shape.head_bytes + shape.check_bytes
    needed += filled * shape.kv_projection_bytes
    needed += caches * rows * max(1, context) * shape.kv_token_bytes + BEYOND_CACHES
    # Packing holds a matrix twice for a moment.
    needed += max(shape.head_bytes, shape.layer_bytes)
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else _free_memory()
    if free is not None and needed > free:
        raise ExitServeError(
            f"timing these shapes needs {needed / 2**30:.1f} GiB of memory and {free / 2**30:.1f} "
            f"GiB are free: free some, lower --batch-sizes or --context, or give a --device."
        )


def _free_memory() -> int | None:
    info = Path("/proc/meminfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


@contextmanager
def _threads(device: torch.device) -> Iterator[int]:
    """Sets as many threads as vLLM would use: it keeps one core for its scheduler."""
    before = torch.get_num_threads()
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, machine()["cores"] - 1))
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def _timer(work: Work, threads: int) -> Callable[[], float]:
    """A function that does the work once and returns the seconds."""
    # The time of one thread leaves out other processes; several threads wait for each other.
    clock = time.thread_time if threads == 1 else time.perf_counter

    def timed() -> float:
        start = clock()
        work()
        return clock() - start

    return timed


def _graph_timer(work: Work) -> Callable[[], float]:
    """The same on a GPU, replayed from a CUDA graph, as vLLM runs it."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def timed() -> float:
        before = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        after = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3

    return timed
