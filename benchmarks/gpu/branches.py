"""IF nodes in a CUDA graph, by themselves: one in another, and memory that a body makes.

    python benchmarks/gpu/branches.py OUT.json

Exits that the device decides lie in such nodes. What fails here fails without vLLM.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import if_nodes
import torch
from torch import Tensor

from exitserve.engine.layers.branches import can_branch_in_graphs, when

MORE = 40
"""Graphs after the first, in its pool as vLLM's are: more than PyTorch has streams."""


def nested(outer: Tensor, inner: Tensor, weight: Tensor, state: Tensor) -> None:
    """A body with a product, whose result is made there, and another node; writes `state` [2]."""

    def body() -> None:
        def within() -> None:
            state[1:] += (weight @ weight).trace()[None]

        state[:1] += (weight @ weight).sum()[None]
        when(inner, within)

    when(outer, body)


def captured(work: Callable[[], None], pool: Any) -> Callable[[], None]:
    """The work as a graph where a card can hold one, else as it is."""
    if not (torch.cuda.is_available() and can_branch_in_graphs()):
        return work
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool):
        work()
    return graph.replay


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved() if device.type == "cuda" else 0


def main() -> int:
    """Writes the facts; the exit status is 1 if a replay did anything but its flags said."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    are_ours = if_nodes.are_missing()
    if_nodes.install()
    size = 64
    weight = torch.eye(size, device=device)
    flags = torch.ones(2, dtype=torch.bool, device=device)
    state = torch.zeros(2, device=device)
    nested(flags[0], flags[1], weight, state)  # cuBLAS and its kernels are loaded outside
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    reserved = [_reserved(device)]
    replays = []
    for _ in range(1 + MORE):
        replays.append(captured(lambda: nested(flags[0], flags[1], weight, state), pool))
        reserved.append(_reserved(device))
    replay = replays[0]
    wrong = []
    for outer, inner in product((True, False), repeat=2):
        flags.copy_(torch.tensor([outer, inner]))
        state.zero_()
        for _ in range(3):
            replay()
        expected = [3.0 * size * outer, 3.0 * size * (outer and inner)]
        if state.tolist() != expected:
            wrong.append(f"flags {outer}, {inner}: {state.tolist()}, not {expected}")
    facts = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "if_nodes": device.type == "cuda" and can_branch_in_graphs(),
        "from": "CUDA's bindings" if are_ours else "PyTorch",
        "graph_bytes": reserved[1] - reserved[0],
        "more_graphs_bytes": reserved[-1] - reserved[1],
        "wrong": wrong,
    }
    Path(sys.argv[1]).write_text(json.dumps(facts, indent=2), encoding="utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
