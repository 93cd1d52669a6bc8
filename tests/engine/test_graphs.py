"""What a CUDA graph asks of the masked loop, and runner V2 of its adapter, shown without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from exitserve.bench.forced_model import ForcedOutcomes, forced_device_requests
from exitserve.check_schedule import CheckSchedule
from exitserve.engine.compat.runner import watch_ends
from exitserve.engine.device.requests import DeviceRequests, PassRows
from exitserve.engine.device.rows import DeviceRows
from exitserve.engine.hooks.model_state import ExitModelState
from exitserve.engine.layers.branches import every_branch, when
from exitserve.engine.layers.masked_loop import MaskedLoop
from exitserve.engine.requests import Request
from exitserve.engine.state import EngineState
from exitserve.policy import ExitPolicy, ExitRules
from exitserve_kernels.exit_check import check_logits

WIDTH, VOCABULARY, LAYERS, MOST = 8, 16, 6, 4
RULES = ExitRules(num_layers=LAYERS, exit_layers=(2, 4), break_even={2: 0.3})
CPU = torch.device("cpu")


class Layers:
    """A masked segment of a decoder that carries the stream as a pair."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.runs = 0

    def __call__(
        self,
        positions: Tensor,
        hidden: Tensor,
        residual: Tensor | None,
        frozen: Tensor,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:
        self.runs += 1
        total = hidden if residual is None else hidden + residual
        return hidden.tanh().masked_fill(frozen, 0.0), torch.where(frozen, state, total)


class Head:
    """A head whose states are half of the logits."""

    has_gates = False

    def check(self, normed: Tensor, _: int, limits: Tensor, ends: Tensor) -> Any:
        logits = torch.cat([normed, -normed], dim=-1)
        last = torch.tensor([1], device=normed.device)
        return check_logits(logits, limits, end_tokens=last, end_thresholds=ends), logits


class Parts:
    """A pass over toy layers, with a note of what was filled."""

    def __init__(self) -> None:
        self.filled: list[int] = []
        self.segments = [Layers(2), Layers(4), Layers(LAYERS)]
        fill = SimpleNamespace(fill=lambda state, positions, end: self.filled.append(end))
        parts: Any = (self.segments, lambda hidden, residual: hidden, Head(), fill)
        self.loop = MaskedLoop(*parts)

    def run(self, rows: DeviceRows, tokens: int = MOST) -> Tensor:
        """A pass, but for vLLM's own."""
        rows.start()
        hidden = torch.randn(tokens, WIDTH)
        normed = self.loop.run(torch.zeros(tokens, dtype=torch.long), hidden, rows)
        when(
            rows.ran_all_layers().any(),
            lambda: rows.take_last_logits(torch.zeros(len(rows.logits), VOCABULARY)),
        )
        return normed


def room(rows: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, VOCABULARY, device=device)


def requests(rules: ExitRules = RULES, device: torch.device = CPU) -> DeviceRequests:
    state = EngineState(rules, torch.tensor([1]))
    return DeviceRequests(state, MOST, room(MOST, device), device)


def request_of(name: str, policy: ExitPolicy, prompt: tuple[int, ...] = (5, 6, 7)) -> Request:
    return Request(policy, CheckSchedule({}), prompt_ids=prompt, name=name)


def decode(names: list[str], first: int = 5) -> PassRows:
    """A pass of one token for each request, behind prompts of three tokens."""
    count = len(names)
    return PassRows(range(count), names, [first] * count, [1] * count, [3] * count, MOST, MOST)


def add(every: DeviceRequests, slot: int, policy: ExitPolicy) -> None:
    every.add(slot, request_of(str(slot), policy))


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
    *("_uploaded", "_any_may_exit", "_depth", "_logits", "_in_order", "_every", "checks", "reads"),
    *("_requests.limits", "_requests.end_limits", "_requests.schedule._rate"),
    *("_requests.schedule._wait", "_requests.schedule._next_wait"),
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
        if found.is_meta and not func.is_view:
            copies = func is torch.ops.aten.copy_.default and not args[1].is_meta
            self.copies, self.others = self.copies + copies, self.others + (not copies)
        return found


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
    assert launches(every.remove, "0") == (0, 1)
    assert launches(every.add, 3, known[0]) == (0, 1)


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
    assert every._by_slot[0].depths == [LAYERS] * 3 + [2]
    assert every._by_slot[1].depths == [LAYERS] * 4


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


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> ExitModelState:
    """The adapter, without the parts of vLLM that need a model."""
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    def start(self: Any, vllm_config: Any, *others: Any) -> None:
        self.max_num_reqs, self.device = MOST, CPU
        self.rope_state = self.prompt_embeds_state = None
        self.supports_mm_inputs = False

    monkeypatch.setattr(DefaultModelState, "__init__", start)
    known = EngineState(RULES, torch.tensor([1]))
    monkeypatch.setattr("exitserve.engine.hooks.model_state.state_of", lambda _: known)
    every = DeviceRequests(known, MOST, room(MOST, CPU), CPU)
    model: Any = SimpleNamespace(make_device_requests=lambda most_rows, device: every)
    made = ExitModelState(None, model, None, CPU)
    assert known.requests is made._requests
    return made


def batch(names: list[str], computed: list[int], scheduled: list[int], padded: int) -> Any:
    """An `InputBatch` of runner V2, as far as the adapter reads it."""
    ends = np.cumsum(scheduled)
    return SimpleNamespace(
        req_ids=names,
        idx_mapping_np=np.arange(len(names)),
        num_reqs=len(names),
        num_reqs_after_padding=padded,
        num_tokens=int(ends[-1]),
        num_tokens_after_padding=max(padded, int(ends[-1])),
        num_scheduled_tokens=np.array(scheduled),
        num_computed_tokens_np=np.array(computed),
        prefill_len_np=np.array([3] * len(names)),
        logits_indices=torch.tensor(ends - 1, dtype=torch.int32),
    )


def request(name: str, **fields: Any) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(extra_args=fields)
    return SimpleNamespace(
        req_id=name, prompt_token_ids=[5, 6, 7], prompt_len=3, sampling_params=params
    )


def test_the_adapter_follows_runner_v2(state: ExitModelState) -> None:
    state.add_request(0, request("a", exit_layer=2, exit_trace=["t"]))
    state.add_request(1, request("b"))
    every = state._requests
    for computed, scheduled, padded, expected in (
        ([0, 0], [3, 2], 4, False),  # a prompt, and a part of one: nobody may exit
        ([3, 2], [1, 1], 4, True),
        ([4, 3], [1, 1], 2, True),
    ):
        given = state.prepare_inputs(batch(["a", "b"], computed, scheduled, padded), None)
        rows = given["exits"]
        assert rows is every.rows
        assert rows.may_differ == bool(rows.any_may_exit) == expected
        if expected:
            Parts().run(rows, padded)
        state.postprocess_state(torch.arange(2), torch.ones(2))
    every.drain(wait=True)
    assert every._by_slot[0].depths == [LAYERS, 2, 2]
    assert every._by_slot[1].depths == [LAYERS, LAYERS]
    assert every._recorder.take_traces("t") == {"a": {0: LAYERS, 1: 2, 2: 2}}

    # Preempted, it comes back to another slot, and freezes its tokens where it did before.
    state.remove_request("a")
    state.add_request(2, request("a", exit_layer=2, exit_trace=["t"]))
    # Positions 0 to 2 are the prompt; 3 and 4 led to tokens 1 and 2.
    for first, count, known in ((0, 5, [LAYERS] * 5 + [2, 2]), (3, 1, [LAYERS, LAYERS, 2])):
        again = batch(["x", "y", "a"], [0, 0, first], [1, 1, count], 3)
        again.prefill_len_np[2] = 6
        rows = state.prepare_inputs(again, None)["exits"]
        assert rows.known_depth.tolist() == known


def test_requests_that_end_are_forgotten_and_preempted_ones_are_not(state: ExitModelState) -> None:
    """By vLLM's own account of who ends, which calls the adapter for both."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    runner: Any = SimpleNamespace(pooling_runner=None, _remove_request=state.remove_request)
    runner.finish_requests = lambda output: GPUModelRunner.finish_requests(runner, output)
    watch_ends(runner, state._requests.forget)

    def step(*, preempted: set[str], finished: set[str]) -> set[str]:
        runner.finish_requests(
            SimpleNamespace(finished_req_ids=finished, preempted_req_ids=preempted)
        )
        return {one.name for one in state._requests._preempted.requests()}

    for slot, name in enumerate("abc"):
        state.add_request(slot, request(name))
    assert step(preempted={"a", "b"}, finished={"c"}) == {"a", "b"}
    assert step(preempted=set(), finished={"b"}) == {"a"}, "aborted while it was preempted"
    state.remove_request("a")  # as vLLM does before it adds one
    state.add_request(0, request("a"))
    assert step(preempted=set(), finished={"a"}) == set()


def test_graphs_are_captured_with_nobody_in_them(state: ExitModelState) -> None:
    state.add_request(0, request("a", exit_layer=2))
    rows = state.prepare_dummy_inputs(3, 3)["exits"]
    assert rows.warms_up
    assert rows.padding.tolist() == [True] * 3
    assert not rows.may_differ
    rows = state.prepare_inputs(batch(["a"], [3], [1], 4), None)["exits"]
    assert not rows.warms_up
    assert rows.padding.tolist() == [False, True, True, True]
