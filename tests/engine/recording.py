"""CUDA graphs without a GPU: what is captured is a list of operations on tensors of the CPU.

A capture runs every operation once, to have its results, and then undoes what was written to
tensors that were there before: a real one runs nothing. A replay runs the operations again, without
the Python around them, on the same tensors. So it shows what a GPU would: numbers that Python read
or made, tensors that have moved since, and results of branches that were not taken, which hold NaN.

What stays invisible: memory that a graph's pool gives out twice, streams, and numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
FROM_THE_HOST = torch.ops.aten.lift_fresh.default
"""What `torch.tensor` does: on a GPU a copy that waits. A number that is put into a part of a
tensor is no copy, but looks the same here."""
ONLY_ALLOCATE = ("aten::empty", "aten::new_empty")


def tensors(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass
class Operation:
    """What a graph runs: a function on tensors, and those that it makes, by their place among all
    that it returns."""

    work: Callable[[], Any]
    made: dict[int, Tensor]

    def again(self) -> None:
        found = tensors(self.work())
        for index, made in self.made.items():
            made.copy_(found[index])


@dataclass
class Branch:
    """An IF node."""

    flag: Tensor
    body: list[Operation | Branch] = field(default_factory=list)

    def again(self) -> None:
        if bool(self.flag):
            run(self.body)


def spoil(made: Iterable[Tensor]) -> None:
    """Puts numbers there that no pass would give."""
    for one in made:
        if one.is_floating_point():
            one.fill_(float("nan"))
        elif one.dtype != torch.bool:
            one.fill_(torch.iinfo(one.dtype).max)
        else:
            one.random_(0, 2)


def run(log: list[Operation | Branch]) -> None:
    for one in log:
        one.again()


class RecordedGraph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    captures: ClassVar[RecordedGraph | None] = None
    """The one that is being captured."""
    let_go: ClassVar[list[tuple[RecordedGraph, list[Tensor]]]] = []
    """What graphs gave that nobody keeps: on a GPU other graphs make theirs in its place."""

    def __init__(self) -> None:
        self.replays = 0
        self._open: list[list[Operation | Branch]] = [[]]
        self._made: dict[int, Tensor] = {}
        self._before: dict[int, tuple[Any, Any]] = {}

    @staticmethod
    def get_currently_capturing_graph() -> RecordedGraph | None:
        return RecordedGraph.captures

    def begin_capture_to_if_node(self, flag: Tensor) -> None:
        branch = Branch(flag)
        self._open[-1].append(branch)
        self._open.append(branch.body)

    def end_capture_to_conditional_node(self) -> None:
        self._open.pop()

    def add(self, work: Callable[[], Any], made: dict[int, Tensor]) -> None:
        self._open[-1].append(Operation(work, made))

    def make(self, *fresh: Tensor) -> None:
        self._made |= {place(one): one for one in fresh}

    def about_to_write(self, *written: Tensor) -> None:
        for one in written:
            storage = one.untyped_storage()
            if place(one) not in self._made and place(one) not in self._before:
                self._before[place(one)] = (storage, storage.clone())

    def undo(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()

    @torch.inference_mode()
    def replay(self) -> None:
        assert len(self._open) == 1, "a branch was left open"
        spoil(self._made.values())
        for given in (own for graph, own in RecordedGraph.let_go if graph is not self):
            spoil(given)
        self.replays += 1
        run(self._open[0])


class Recorder(TorchDispatchMode):
    """Writes operations down while they run."""

    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in READS, "a number is read while a graph is captured"
        copies = func is FROM_THE_HOST and args[0].dim() > 0
        assert not copies, "numbers of the host are copied while a graph is captured"
        kwargs = kwargs or {}
        given = tensors(args, kwargs)
        # Not every operation of vLLM's says what it writes; one that returns nothing must write.
        writes = func._schema.is_mutable or not func._schema.returns
        if writes:
            self._graph.about_to_write(*given)
        found = func(*args, **kwargs)
        known = {place(one) for one in given if one.numel()}
        fresh = {at: one for at, one in enumerate(tensors(found)) if place(one) not in known}
        made = {at: one for at, one in fresh.items() if one.numel()}
        self._graph.make(*made.values())
        if writes or (fresh and not func._schema.name.startswith(ONLY_ALLOCATE)):
            self._graph.add(lambda: func(*args, **kwargs), made)
        return found


@contextmanager
def capture(graph: RecordedGraph, *_: Any, **__: Any) -> Iterator[None]:
    """Stands in for `torch.cuda.graph`."""
    RecordedGraph.captures = graph
    try:
        with Recorder(graph):
            yield
    finally:
        RecordedGraph.captures = None
        with torch.inference_mode():
            graph.undo()


def record(work: Callable[[], Any], *written: Tensor) -> None:
    """Does what torch does not see; a graph that is being captured takes it along."""

    def unseen() -> None:
        with _disable_current_modes():
            work()

    if (graph := RecordedGraph.captures) is not None:
        with _disable_current_modes():
            graph.about_to_write(*written)
        graph.add(unseen, {})
    unseen()


def launched(call: Callable[..., Any]) -> Callable[..., Any]:
    """Kernels in Triton's interpreter."""

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        record(lambda: call(executor, *args, **kwargs), *tensors(args, kwargs))

    return launch


def spent(given: Any) -> Any:
    """Stands in for vLLM's `weak_ref_tensors`, which it calls while a piece is captured if what
    that gives is not for another piece."""
    if (graph := RecordedGraph.captures) is not None:
        RecordedGraph.let_go.append((graph, tensors(given)))
    return given


def collective(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One of vLLM's, a method of a group; on a CPU it may write into what it is given."""

    def meet(group: Any, given: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if (graph := RecordedGraph.captures) is None:
            return call(group, given, *args, **kwargs)
        with _disable_current_modes():
            graph.about_to_write(given)
            found = call(group, given, *args, **kwargs)
        made = {} if place(found) == place(given) else {0: found}
        graph.make(*made.values())
        graph.add(lambda: call(group, given, *args, **kwargs), made)
        return found

    return meet


def record_graphs(patch: pytest.MonkeyPatch) -> None:
    """Puts recorded graphs in the place of CUDA's."""
    import vllm.utils.torch_utils  # noqa: F401  # puts its own set_stream there, before ours

    from exitserve.engine.layers import branches

    stream = SimpleNamespace(wait_stream=lambda _: None)
    patch.setattr(branches, "is_captured", lambda _: RecordedGraph.captures is not None)
    patch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    patch.setattr(torch.cuda, "graph", capture)
    patch.setattr(branches, "_BODIES", [stream] * 2)
    patch.setattr(branches, "_is_capturing", lambda _: False)
    patch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    patch.setattr(torch.cuda, "set_stream", lambda _: None)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    record_graphs(monkeypatch)
