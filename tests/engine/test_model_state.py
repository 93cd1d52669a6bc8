"""What runner V2 asks of its adapter, shown without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from exitserve.engine.compat.runner import watch_ends
from exitserve.engine.early_exit.device.batch import DeviceRequests
from exitserve.engine.hooks.model_state import ExitModelState
from exitserve.engine.state import EngineState

from .toy_pass import CPU, LAYERS, MOST, RULES, Parts, put, room


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
    every = DeviceRequests(known, MOST, room(MOST, CPU), CPU, put)
    model: Any = SimpleNamespace(make_device_requests=lambda most_rows, device: every)
    made = ExitModelState(None, model, None, CPU)
    assert known.requests is made._requests
    return made


def batch(
    names: list[str],
    computed: list[int],
    scheduled: list[int],
    padded: int,
    padded_tokens: int | None = None,
) -> Any:
    """An `InputBatch` of runner V2, as far as the adapter reads it."""
    ends = np.cumsum(scheduled)
    return SimpleNamespace(
        req_ids=names,
        idx_mapping_np=np.arange(len(names)),
        num_reqs=len(names),
        num_reqs_after_padding=padded,
        num_tokens=int(ends[-1]),
        num_tokens_after_padding=padded_tokens or max(padded, int(ends[-1])),
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
    every.update_counts()
    assert every.by_slot[0].depths == [LAYERS, 2, 2]
    assert every.by_slot[1].depths == [LAYERS, LAYERS]
    assert every._recorder.take_traces("t") == {"a": {0: (LAYERS, ""), 1: (2, ""), 2: (2, "")}}

    # Preempted, it comes back to another slot, and freezes its tokens where it did before.
    state.remove_request("a")
    state.add_request(2, request("a", exit_layer=2, exit_trace=["t"]))
    # Positions 0 to 2 are the prompt; 3 and 4 led to tokens 1 and 2.
    for first, count, known in ((0, 5, [LAYERS] * 5 + [2, 2]), (3, 1, [LAYERS, LAYERS, 2])):
        again = batch(["x", "y", "a"], [0, 0, first], [1, 1, count], 3)
        again.prefill_len_np[2] = 6
        rows = state.prepare_inputs(again, None)["exits"]
        assert rows.known_depth.tolist() == known


def paddings(rows: int) -> list[tuple[int, int]]:
    """Rows and tokens that graphs of `rows` rows of one token may have."""
    whole = [(padded, padded) for padded in range(rows, MOST + 1)]
    by_tokens = [(rows, tokens) for tokens in range(rows, 2 * MOST + 1)]
    return list(dict.fromkeys([*whole, *by_tokens]))


@pytest.mark.parametrize("rows", range(1, MOST + 1))
def test_padding_changes_nothing(state: ExitModelState, rows: int) -> None:
    """Graphs of whole passes pad rows and tokens alike, piecewise ones tokens alone."""
    names = [str(slot) for slot in range(rows)]
    layers = [(2, 4, None)[slot % 3] for slot in range(rows)]
    for slot, (name, layer) in enumerate(zip(names, layers, strict=True)):
        state.add_request(slot, request(name, **({"exit_layer": layer} if layer else {})))
    for padded, tokens in paddings(rows):
        given = batch(names, [4] * rows, [1] * rows, padded, tokens)
        exits = state.prepare_inputs(given, None)["exits"]
        parts = Parts()
        normed = parts.run(exits, tokens)
        assert normed.shape[0] == tokens
        assert exits.depth[:rows].tolist() == [layer or LAYERS for layer in layers]
        assert not exits.depth[rows:].any()
        assert sum(one.runs for one in parts.segments) == (3 if rows > 2 else rows)
        state.postprocess_state(torch.arange(rows), torch.ones(rows))


def test_requests_that_end_are_forgotten_and_preempted_ones_are_not(state: ExitModelState) -> None:
    """By vLLM's own account of who ends, which calls the adapter for both."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    runner: Any = SimpleNamespace(pooling_runner=None, _remove_request=state.remove_request)
    runner.finish_requests = lambda output: GPUModelRunner.finish_requests(runner, output)
    watch_ends(runner, state._requests.preempted.forget)

    def step(*, preempted: set[str], finished: set[str]) -> set[str]:
        runner.finish_requests(
            SimpleNamespace(finished_req_ids=finished, preempted_req_ids=preempted)
        )
        return set(state._requests.preempted.names)

    for slot, name in enumerate("abc"):
        state.add_request(slot, request(name))
    assert step(preempted={"a", "b"}, finished={"c"}) == {"a", "b"}
    assert step(preempted=set(), finished={"b"}) == {"a"}, "aborted while it was preempted"
    state.remove_request("a")  # as vLLM does before it adds one
    state.add_request(0, request("a"))
    assert step(preempted=set(), finished={"a"}) == set()
