"""What a CUDA graph asks of the masked loop, shown without a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from exitserve.bench.forced_model import ForcedOutcomes, forced_device_requests
from exitserve.engine.drafting.forward import DraftingLoop
from exitserve.engine.drafting.requests import Judged
from exitserve.engine.early_exit.device import loop
from exitserve.engine.early_exit.device.requests import PassRows
from exitserve.engine.early_exit.masked_loop import MaskedSegment, Room
from exitserve.engine.layers.branches import every_branch, when
from exitserve.engine.layers.segments import ended
from exitserve.engine.state import EngineState
from exitserve.policy import ExitPolicy, ExitRules

from .toy_pass import (
    CPU,
    LAYERS,
    MOST,
    RULES,
    WIDTH,
    Layers,
    Parts,
    add,
    decode,
    request_of,
    requests,
    room,
)


def test_no_number_is_read_on_the_way() -> None:
    """Under fake tensors whoever reads a number, or a shape that depends on one, is stopped."""
    with FakeTensorMode(), every_branch():
        every = requests()
        every.rows.begin((), MOST, warms_up=True)
        parts = Parts()
        assert parts.run(every.rows).shape == (MOST, WIDTH)
        assert [one.runs for one in parts.segments] == [1, 1, 1]
        assert parts.filled == [2, 4]


HELD = (
    *("_uploaded", "_any_may_exit", "_depth", "_logits", "checks", "reads"),
    *("_requests.limits", "_requests.end_limits", "_requests.least_scores"),
)


def test_logits_are_written_once() -> None:
    """Of large batches they are the most that the device moves beside weights."""
    every = requests(device=torch.device("meta"))
    every.begin(decode(["0", "1"]), None)
    logits, yes = room(MOST, torch.device("meta")), torch.ones(MOST, device="meta").bool()
    written = []

    class Written(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = func(*args, **(kwargs or {}))
            written.extend([func] * (found.shape == logits.shape and not func.is_view))
            return found

    every.rows.start()
    with Written():
        every.rows.settle(2, yes, yes, logits)
        every.rows.take_last_logits(logits)
    assert written == [torch.ops.aten.where.self_out] * 2


@pytest.mark.parametrize("is_last", [True, False])
def test_norms_leave_the_stream_as_it_is(is_last: bool) -> None:
    """They are compiled with the layers before them; vLLM's writes into a pair that it is given."""

    def norm(hidden: Tensor, residual: Tensor | None) -> Tensor:
        if residual is None:
            return 2 * hidden
        residual += hidden
        return hidden.copy_(2 * residual)

    stream = torch.ones(3), torch.ones(3) * 4
    normed, scores, *after = ended(norm, is_last=is_last)(stream)
    assert scores is None
    assert normed.tolist() == [10.0] * 3
    assert (
        after == [None, None]
        if is_last
        else [one.tolist() for one in after] == [[1.0] * 3, [4.0] * 3]
    )


def test_drafts_and_their_judge_norm_in_segments() -> None:
    class Ends:
        """Layers and the norm behind them; a model has no other."""

        def __init__(self, end: int) -> None:
            self.end = end

        def __call__(self, _: Tensor, hidden: Tensor, residual: Tensor | None) -> Any:
            own = hidden if residual is None else hidden + residual
            return own + 100 * self.end, None, own, own

    class Head:
        screens: Mapping[int, Any] = {}

        def check(self, normed: Tensor, *limits: Tensor) -> Any:
            return SimpleNamespace(exits=normed[:, 0] > limits[0]), normed

        def logits_of(self, logits: Tensor, kept: Sequence[int]) -> Tensor:
            return logits

    model: Any = SimpleNamespace(embed=lambda ids, positions, embeds: ids[:, None].float())
    parts: Any = ([Ends(2), Ends(4)], Head(), None)
    loop = DraftingLoop(model, *parts, MOST)
    ids = torch.arange(3)
    assert loop.draft(ids, ids)[:, 0].tolist() == [200, 201, 202]
    full = loop.run(ids, ids[:, None].float())
    assert full[:, 0].tolist() == [400, 402, 404]
    limits = torch.tensor([[200.5, 200.5, -torch.inf]] * 2)
    judged = Judged(torch.tensor([0, 2]), limits, torch.zeros(2, dtype=torch.bool))
    loop.judge(judged)
    found = loop.logits(full[[0, 2]], lambda normed: normed)
    assert found is not None and found[:, 0].tolist() == [400, 202]
    assert judged.is_final.tolist() == [False, True]


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


class Launches(TorchDispatchMode):
    """What the host asks of the device meanwhile; "meta" stands for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0
        """From the host."""
        self.others = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensor:
        found: Tensor = func(*args, **(kwargs or {}))
        if not func.is_view and found.is_meta:
            copies = func is torch.ops.aten.copy_.default and not args[1].is_meta
            self.copies, self.others = self.copies + copies, self.others + (not copies)
        return found


def test_an_exit_is_few_kernels() -> None:
    """A graph launches each of them, however little it does."""

    def kernels(*exits: int) -> int:
        every = requests(ExitRules(num_layers=LAYERS, exit_layers=exits), torch.device("meta"))
        every.rows.begin((), MOST, warms_up=True)
        parts = Parts()
        parts.loop.segments = [MaskedSegment(end, Layers(end)) for end in (*exits, LAYERS)]
        with every_branch(), Launches() as seen:
            parts.run(every.rows)
        return seen.others

    # Of these, the toy layers and head are about fifteen.
    assert kernels(2, 4) - kernels(2) <= 45


def test_a_pass_is_told_in_one_copy() -> None:
    every = requests(device=torch.device("meta"))

    def launches(work: Callable[..., None], *arguments: Any) -> tuple[int, int]:
        with Launches() as seen:
            work(*arguments)
        return seen.copies, seen.others

    policies = (ExitPolicy.confidence(0.5), ExitPolicy.fixed(2), ExitPolicy.off())
    known = [request_of(str(slot), policy) for slot, policy in enumerate(policies)]
    assert [launches(every.add, slot, one) for slot, one in enumerate(known)] == [
        (1, 0),
        (1, 0),
        (0, 0),
    ]
    for names, first, copies in (
        (["0", "1", "2"], 0, 0),  # prompts
        (["0", "1", "2"], 5, 1),
        (["0"], 5, 1),
        (["x", "x", "2"], 5, 1),  # once it is told that nobody may exit
        (["x", "x", "2"], 5, 0),  # nothing is
        (["x", "x", "2"], 6, 0),
        (["0", "x", "2"], 6, 1),
    ):
        assert launches(every.begin, decode(names, first), None) == (copies, 0)
    known[0].depths = [LAYERS, 2, 2]  # a request that comes back, among others' tokens
    again = PassRows([0, 1], ["0", "1"], [0, 5], [5, 1], [6, 3], 2, 8)
    places = torch.zeros(2, dtype=torch.int32, device="meta")
    assert launches(every.begin, again, places) == (2, 4)
    assert launches(every.remove, "2") == (0, 0)
    assert launches(every.remove, "0") == (0, 0)
    assert launches(every.add, 3, known[0]) == (1, 0)


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
    every.drain(wait=True)
    assert every.by_slot[0].depths == [LAYERS] * 3 + [2]
    assert every.by_slot[1].depths == [LAYERS] * 4


def test_a_model_without_exits_takes_no_logits_from_them() -> None:
    every = requests(rules=ExitRules(num_layers=LAYERS, exit_layers=()))
    add(every, 0, ExitPolicy.confidence(0.5))
    every.begin(decode(["0"]), None)
    assert not every.rows.may_differ
    assert not every.rows.has_logits


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
    unused: Any = None
    propagation: Any = SimpleNamespace(load=lambda hidden: None)
    device_loop = loop.DeviceLoop(unused, segments, unused, propagation, MOST)
    given = torch.randn(tokens, WIDTH)
    gc.collect()
    own = torch.zeros(tokens, dtype=torch.long)
    device_loop.run(None, own, lambda: given, lambda: given)
    assert held == [MOST if tokens == MOST else MOST + tokens] * 2


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_benchmarks_draw_who_exits(share: float) -> None:
    outcomes = ForcedOutcomes({"confidence": share, "acceptance": 0.0})
    state = EngineState(RULES, torch.tensor([1]))
    every = forced_device_requests(state, MOST, room(MOST, CPU), CPU, outcomes)
    for slot in range(MOST):
        policy = ExitPolicy.confidence(0.9)
        every.add(slot, request_of(str(slot), policy, (slot, 6, 7)))
    for position in (5, 6):
        every.begin(decode(["0", "1", "2", "3"], position), None)
        Parts().run(every.rows)
        drawn = [
            next(
                (at for at in (2, 4) if outcomes.passes([(hash((slot, 6, 7)), position, at)])[0]),
                LAYERS,
            )
            for slot in range(MOST)
        ]
        assert every.rows.depth.tolist() == drawn
        every.end()


def test_branches_outside_graphs_are_the_hosts() -> None:
    seen: list[str] = []
    when(torch.tensor(True), lambda: seen.append("taken"))
    when(torch.tensor(False), lambda: seen.append("not taken"))
    with every_branch():
        when(torch.tensor(False), lambda: seen.append("warmed up"))
    assert seen == ["taken", "warmed up"]


class StreamsOfACapture:
    """What CUDA and a graph that is captured do to the current stream, and nothing else."""

    def __init__(self) -> None:
        self.current = "graph"

    def begin_capture_to_if_node(self, flag: Any) -> None:
        self.current += f", if {flag.name}"

    def end_capture_to_conditional_node(self) -> None:
        self.current = self.current.rpartition(",")[0]


def test_collectives_of_a_branch_go_to_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM sends them to the stream that it tracks, which is the one that was set last."""
    from vllm.utils import torch_utils

    graph = StreamsOfACapture()
    monkeypatch.setattr(torch_utils, "prev_set_stream", lambda stream: None)
    # A test that has stood in for it may have been there before vLLM.
    monkeypatch.setattr(torch.cuda, "set_stream", torch_utils._patched_set_stream)
    monkeypatch.setattr(torch_utils._current_stream_tls, "value", "graph", raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: graph.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    capturing = staticmethod(lambda: graph)
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "get_currently_capturing_graph", capturing, raising=False
    )
    outer, inner = (SimpleNamespace(name=name, is_cuda=True) for name in ("a", "b"))
    used = []

    def collective() -> None:
        used.append(torch_utils.current_stream())

    def body() -> None:
        collective()
        when(inner, collective)
        collective()

    when(outer, body)
    collective()
    assert used == ["graph, if a", "graph, if a, if b", "graph, if a", "graph"]
