"""What a CUDA graph asks of the masked loop, and runner V2 of its adapter, shown without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from exitserve.engine.branches import every_branch, when
from exitserve.engine.compat.model_state import ExitModelState
from exitserve.engine.forced import Forced
from exitserve.engine.masked import MaskedPass
from exitserve.engine.resident_requests import Known, PassRows, ResidentRequests, resident_requests
from exitserve.engine.rows import Rows
from exitserve.policy import ExitPolicy, ExitRules
from exitserve_kernels.exit_check import ExitCheck, check_logits

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

    def check(self, normed: Tensor, *thresholds: Tensor) -> tuple[ExitCheck, Tensor]:
        logits = torch.cat([normed, -normed], dim=-1)
        ends = torch.tensor([1], device=normed.device)
        found = check_logits(logits, thresholds[0], end_tokens=ends, end_thresholds=thresholds[1])
        return found, logits


class Parts:
    """A pass over toy layers, with a note of what was filled."""

    def __init__(self) -> None:
        self.filled: list[int] = []
        self.segments = [Layers(2), Layers(4), Layers(LAYERS)]
        fill = SimpleNamespace(fill=lambda state, positions, end: self.filled.append(end))
        parts: Any = (self.segments, lambda hidden, residual: hidden, Head(), fill)
        self.loop = MaskedPass(*parts)


def requests(forced: Forced | None = None) -> ResidentRequests:
    room: Callable[..., Tensor] = lambda rows, device: torch.zeros(rows, VOCABULARY)  # noqa: E731
    rows = Rows(RULES, torch.tensor([1]), forced=forced)
    return resident_requests(rows, SimpleNamespace(logits_room=room), MOST, CPU)


def decode(names: list[str], first: int = 5) -> PassRows:
    """A pass of one token for each request, behind prompts of three tokens."""
    count = len(names)
    return PassRows(range(count), names, [first] * count, [1] * count, [3] * count, MOST, MOST)


def add(every: ResidentRequests, slot: int, policy: ExitPolicy) -> None:
    every.add(slot, Known(str(slot), policy, 3, None))


def test_no_number_is_read_on_the_way() -> None:
    """Under fake tensors whoever reads a number, or a shape that depends on one, is stopped."""
    with FakeTensorMode(), every_branch():
        every = requests()
        rows = every.rows
        rows.num_rows = MOST
        hidden = torch.zeros(MOST, WIDTH)
        parts = Parts()
        normed = parts.loop.run(torch.zeros(MOST, dtype=torch.long), hidden, rows)
        when(rows.rest().any(), lambda: rows.take_rest(torch.zeros(MOST, VOCABULARY)))
        assert normed.shape == hidden.shape
        assert [one.runs for one in parts.segments] == [1, 1, 1]
        assert parts.filled == [2, 4]


def test_what_a_graph_holds_stays_where_it_is() -> None:
    every = requests()
    held = ("_depth", "_logits", "_asked", "_slots", "_may_exit", "_known", "counts")
    before = {name: getattr(every.rows, name).data_ptr() for name in held}
    for names in (["0"], ["0", "1", "2"], []):
        add(every, 0, ExitPolicy.fixed(2))
        every.begin(decode(names), None)
        Parts().loop.run(torch.zeros(MOST, dtype=torch.long), torch.randn(MOST, WIDTH), every.rows)
        every.ended()
    assert {name: getattr(every.rows, name).data_ptr() for name in held} == before


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
        hidden = torch.randn(MOST, WIDTH)
        parts.loop.run(torch.zeros(MOST, dtype=torch.long), hidden, every.rows)
        assert [one.runs for one in parts.segments] == runs, "padding keeps nothing running"
        assert parts.filled == filled
        depths = every.rows.depth.tolist()
        assert depths == [*([2, 4, LAYERS][: len(names)]), *([0] * (MOST - len(names)))]


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_benchmarks_draw_who_exits(share: float) -> None:
    forced = Forced({"confidence": share, "acceptance": 0.0})
    every = requests(forced)
    for slot in range(MOST):
        policy = ExitPolicy.confidence(0.9)
        every.add(slot, Known(str(slot), policy, 3, None, prompt_hash=slot))
    for position in (5, 6):
        every.begin(decode(["0", "1", "2", "3"], position), None)
        hidden = torch.randn(MOST, WIDTH)
        Parts().loop.run(torch.zeros(MOST, dtype=torch.long), hidden, every.rows)
        drawn = [
            next((at for at in (2, 4) if forced.passes([(slot, position, at)])[0]), LAYERS)
            for slot in range(MOST)
        ]
        assert every.rows.depth.tolist() == drawn
        every.ended()


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
    monkeypatch.setattr("exitserve.engine.compat.model_state.rows_of", lambda _: rows)
    rows = Rows(RULES, torch.tensor([1]))
    model: Any = SimpleNamespace(logits_room=lambda most, device: torch.zeros(most, VOCABULARY))
    made = ExitModelState(None, model, None, CPU)
    assert rows.resident is made._requests
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
    params = SimpleNamespace(extra_args=fields, structured_outputs=None)
    return SimpleNamespace(
        req_id=name, prompt_token_ids=[5, 6, 7], prompt_len=3, sampling_params=params
    )


def test_the_adapter_follows_runner_v2(state: ExitModelState) -> None:
    state.add_request(0, request("a", exit_layer=2, exit_trace="t"))
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
        assert rows.may_differ == bool(rows.asked) == expected
        if expected:
            hidden = torch.randn(padded, WIDTH)
            Parts().loop.run(torch.zeros(padded, dtype=torch.long), hidden, rows)
        state.postprocess_state(torch.arange(2), torch.ones(2))
    every.drain(wait=True)
    assert every._by_slot[0].depths == [LAYERS, 2, 2]
    assert every._by_slot[1].depths == [LAYERS, LAYERS]
    assert every._recorder.take_traces("t") == {"a": {0: LAYERS, 1: 2, 2: 2}}

    # Preempted, it comes back to another slot, and freezes its tokens where it did before.
    state.remove_request("a")
    state.add_request(2, request("a", exit_layer=2, exit_trace="t"))
    again = batch(["x", "y", "a"], [0, 0, 0], [1, 1, 5], 3)
    again.prefill_len_np[2] = 6
    rows = state.prepare_inputs(again, None)["exits"]
    # Positions 0 to 2 are the prompt; 3 and 4 led to tokens 1 and 2.
    assert rows.known_depth.tolist() == [LAYERS] * 5 + [2, 2]


def test_graphs_are_captured_with_nobody_in_them(state: ExitModelState) -> None:
    state.add_request(0, request("a", exit_layer=2))
    rows = state.prepare_dummy_inputs(3, 3)["exits"]
    assert rows.warms_up
    assert rows.padding.tolist() == [True] * 3
    assert not rows.may_differ
    rows = state.prepare_inputs(batch(["a"], [3], [1], 4), None)["exits"]
    assert not rows.warms_up
    assert rows.padding.tolist() == [False, True, True, True]


def test_frozen_rows_read_one_key_instead_of_all() -> None:
    from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
    from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata

    from exitserve.engine.compat.context import without_reading_for

    nothing = torch.empty(0)
    lengths = torch.tensor([900, 7, 8000, 0], dtype=torch.int32)
    metadata: Any = TritonAttentionMetadata(
        4, 1, nothing, 8192, lengths, nothing, nothing, 0, 0, nothing, nothing, nothing, True
    )
    metadata.scheduler_metadata = torch.ones(4)
    base: Any = ForwardContext(
        no_compile_layers={}, attn_metadata={"a": metadata, "b": metadata}, slot_mapping={}
    )
    frozen = torch.tensor([[True], [False], [True], [True]])  # the last is padding
    with override_forward_context(base):
        with without_reading_for(frozen):
            inside: Any = get_forward_context().attn_metadata
            assert inside["a"] is inside["b"]
            assert inside["a"].seq_lens.tolist() == [1, 7, 1, 0]
            assert inside["a"].seq_lens.dtype == torch.int32
            assert inside["a"].scheduler_metadata is None
        assert get_forward_context() is base
        assert metadata.seq_lens is lengths
        metadata.max_query_len = 5  # a prompt is among them
        with without_reading_for(frozen):
            assert get_forward_context() is base
