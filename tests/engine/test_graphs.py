"""What a CUDA graph asks of the masked loop, shown without a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from exitserve.engine.early_exit.device import loop
from exitserve.engine.early_exit.masked_loop import Room
from exitserve.engine.layers import branches
from exitserve.engine.layers.branches import every_branch, when
from exitserve.engine.layers.segments import ended
from exitserve.policy import ExitPolicy

from .toy_pass import LAYERS, MOST, WIDTH, Layers, Parts, add, decode, requests


def test_no_number_is_read_on_the_way() -> None:
    """Under fake tensors whoever reads a number, or a shape that depends on one, is stopped."""
    with FakeTensorMode(), every_branch():
        every = requests()
        every.rows.begin((), MOST, warms_up=True)
        parts = Parts()
        assert parts.run(every.rows).shape == (MOST, WIDTH)
        assert [one.runs for one in parts.segments] == [1, 1, 1]
        assert parts.filled == [2, 4]


HELD = ("_uploaded", "_any_may_exit", "_depth", "_logits", "checks", "reads", "_requests.limits")


@pytest.mark.parametrize("is_last", [True, False])
def test_norms_leave_the_stream_as_it_is(is_last: bool) -> None:
    """They are compiled with the layers before them; vLLM's writes into a pair that it is given."""

    def norm(hidden: Tensor, residual: Tensor | None) -> Tensor:
        if residual is None:
            return 2 * hidden
        residual += hidden
        return hidden.copy_(2 * residual)

    stream = torch.ones(3), torch.ones(3) * 4
    normed, *after = ended(norm, is_last=is_last)(stream)
    assert normed.tolist() == [10.0] * 3
    assert (
        after == [None, None]
        if is_last
        else [one.tolist() for one in after] == [[1.0] * 3, [4.0] * 3]
    )


def test_what_a_graph_holds_stays_where_it_is() -> None:
    every = requests()
    where = {name: attrgetter(name)(every.rows).data_ptr() for name in HELD}
    for names in (["0"], ["0", "1", "2"], []):
        add(every, 0, ExitPolicy.fixed(2))
        add(every, 1, ExitPolicy.off())
        every.begin(decode(names), None)
        Parts().run(every.rows)
        every.end()
        every.remove("0")
    assert {name: attrgetter(name)(every.rows).data_ptr() for name in HELD} == where


def test_who_may_not_exit_is_told_once() -> None:
    every = requests()
    add(every, 0, ExitPolicy.fixed(2))
    add(every, 1, ExitPolicy.off())
    for names, asked in ((["x", "1"], False), (["0", "1"], True), (["x", "1"], False)):
        for _ in range(2):
            every.begin(decode(names), None)
            assert bool(every.rows.any_may_exit) == every.rows.may_differ == asked
            if asked:
                Parts().run(every.rows)
            every.end()
    every.update_counts()
    assert every.by_slot[0].depths == [LAYERS] * 3 + [2]
    assert every.by_slot[1].depths == [LAYERS] * 4


def test_reads_are_counted_on_the_device() -> None:
    every = requests()
    recorder = every._recorder
    add(every, 0, ExitPolicy.fixed(2))
    add(every, 1, ExitPolicy.fixed(4))

    def reads() -> tuple[int, int, int, int]:
        every.update_counts()
        found = (recorder.layer_reads, recorder.head_passes, recorder.final_heads)
        return (*found, recorder.frozen_tokens)

    every.rows.begin((), MOST, warms_up=True)
    with every_branch():
        Parts().run(every.rows)
    assert reads() == (0, 0, 0, 0), "a graph that is captured runs nothing"
    expected = (0, 0, 0, 0)
    for names, layers, checks, rest, frozen in (
        (["0"], 2, 1, 0, 1),
        (["0", "1"], 4, 2, 0, 2),
        (["x", "1"], LAYERS, 1, 1, 1),
        (["0", "x"], LAYERS, 1, 1, 1),
        (["x", "x"], LAYERS, 0, 1, 0),  # vLLM's own
    ):
        every.begin(decode(names), None)
        if every.rows.may_differ:
            Parts().run(every.rows)
        every.end()
        expected = tuple(map(sum, zip(expected, (layers, checks, rest, frozen), strict=True)))
        assert reads() == expected


def test_the_pass_ends_where_its_last_row_does() -> None:
    every = requests()
    add(every, 0, ExitPolicy.fixed(2))
    add(every, 1, ExitPolicy.fixed(4))
    for names, runs, filled in (
        (["0"], [1, 0, 0], [2]),
        (["0", "1"], [1, 1, 0], [4]),
        (["0", "1", "unknown"], [1, 1, 1], []),
    ):
        parts = Parts()
        every.begin(decode(names), None)
        parts.run(every.rows)
        assert [one.runs for one in parts.segments] == runs, "padding keeps nothing running"
        assert parts.filled == filled
        depths = every.rows.depth.tolist()
        assert depths == [*([2, 4, LAYERS][: len(names)]), *([0] * (MOST - len(names)))]


@pytest.mark.parametrize("tokens", [MOST, 3 * MOST])
def test_memory_is_planned_with_the_room_of_a_loop(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """vLLM measures the warm-up of the most tokens, which may be more than a graph's."""
    monkeypatch.setattr(loop, "_fresh_context", nullcontext)
    held = []

    class Watched(Layers):
        def __call__(self, *args: Any) -> Any:
            rooms = [one for one in gc.get_objects() if isinstance(one, Room)]
            held.append(sum(len(one.state) for one in rooms))
            return super().__call__(*args)

    segments: Any = [Watched(2), Watched(LAYERS)]
    head: Any = SimpleNamespace(prepare=lambda device: None)
    propagation: Any = SimpleNamespace(load=lambda hidden: None)
    device_loop = loop.DeviceLoop(segments, head, propagation, MOST)
    given = torch.randn(tokens, WIDTH)
    gc.collect()
    own = torch.zeros(tokens, dtype=torch.long)
    device_loop.run(None, own, lambda: given, lambda: given)
    assert held == [MOST if tokens == MOST else MOST + tokens] * 2


def test_branches_outside_graphs_are_the_hosts() -> None:
    seen: list[str] = []
    when(torch.tensor(True), lambda: seen.append("taken"))
    when(torch.tensor(False), lambda: seen.append("not taken"))
    with every_branch():
        when(torch.tensor(False), lambda: seen.append("warmed up"))
    assert seen == ["taken", "warmed up"]


class OfACapture:
    """A stream, and what CUDA and a graph that is captured do to it, and nothing else."""

    current: OfACapture
    pool: list[OfACapture]
    """Given out in turn."""

    def __init__(self, name: str, joined: bool = False) -> None:
        self.name, self.joined, self.ends = name, joined, 0

    def wait_stream(self, other: OfACapture) -> None:
        self.joined |= other.joined

    def begin_capture_to_if_node(self, flag: Any) -> None:
        flag.around, OfACapture.current = OfACapture.current, OfACapture(flag.name, joined=True)
        self.flags = [*getattr(self, "flags", []), flag]

    def end_capture_to_conditional_node(self) -> None:
        assert OfACapture.current.name == self.flags[-1].name, "it ends on its own stream"
        for one in self.pool:  # those that work for the node end with it
            one.joined &= one in (self, *(flag.around for flag in self.flags))
        OfACapture.current = self.flags.pop().around


def test_bodies_are_captured_on_streams_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each depth. vLLM sends collectives to the stream that it tracks: the one set last."""
    from vllm.utils import torch_utils

    graph = OfACapture.current = OfACapture("graph", joined=True)
    # A pool gives out what it gave before: the graph's own stream, too.
    OfACapture.pool = [graph, OfACapture("first"), graph, OfACapture("second")]
    given = iter(OfACapture.pool)
    cuda = {
        "Stream": lambda: next(given),
        "stream": lambda one: using(one),
        # A test that has stood in for it may have been there before vLLM.
        "set_stream": torch_utils._patched_set_stream,
        "current_stream": lambda: OfACapture.current,
        "is_current_stream_capturing": lambda: OfACapture.current.joined,
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    set_current = partial(setattr, OfACapture, "current")
    monkeypatch.setattr(torch_utils, "prev_set_stream", set_current)
    monkeypatch.setattr(torch_utils._current_stream_tls, "value", graph, raising=False)
    monkeypatch.setattr(branches, "_BODIES", [])
    capturing = staticmethod(lambda: graph)
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "get_currently_capturing_graph", capturing, raising=False
    )

    @contextmanager
    def using(stream: OfACapture) -> Iterator[None]:
        around, OfACapture.current = OfACapture.current, stream
        yield
        OfACapture.current = around

    outer, inner = (SimpleNamespace(name=name, is_cuda=True) for name in ("a", "b"))
    used = []

    def collective() -> None:
        assert torch_utils.current_stream() is OfACapture.current
        used.append(OfACapture.current.name)

    def body() -> None:
        collective()
        for _ in range(2):
            when(inner, collective)
        collective()

    for _ in range(2):
        when(outer, body)
    collective()
    assert used == [*["first", "second", "second", "first"] * 2, "graph"]
