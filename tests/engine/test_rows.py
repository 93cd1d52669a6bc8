"""Rows follow vLLM's persistent batch, and steps follow the rows."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exitserve.policy import ExitPolicy, ExitRules

RULES = ExitRules(num_layers=6, exit_layers=(2, 4), default=ExitPolicy.confidence(0.5))


@dataclass
class Engine:
    """The requests of an engine, and its batch."""

    state: Any
    requests: Any


@pytest.fixture
def rows() -> Engine:
    return _engine()


def _engine(rules: ExitRules = RULES) -> Engine:
    from exitserve.engine.early_exit.batch import HostRequests
    from exitserve.engine.state import EngineState

    state = EngineState(rules, torch.tensor([1]))
    return Engine(state, HostRequests(state))


def _params(**fields):
    from vllm import SamplingParams

    return SamplingParams(extra_args=fields or None)


def _update(rows, removed=(), added=(), moved=()) -> None:
    from vllm.v1.sample.logits_processor import BatchUpdate

    rows.requests.update(BatchUpdate(batch_size=8, removed=removed, added=added, moved=moved))


def _step(rows, positions: list[int], row_ends: list[int]):
    from exitserve.engine.compat.context import BatchShape

    return rows.requests.next_step(
        BatchShape(len(positions), torch.tensor(row_ends)), torch.tensor(positions)
    )


def test_each_row_has_its_own_thresholds(rows) -> None:
    prompt = [5, 6, 7]
    added = [
        (0, _params(exit_threshold=0.25), prompt, [9]),
        (1, _params(exit_layer=4), prompt, [9]),
        (2, _params(exit_threshold=1), prompt, [9]),
        (3, _params(), prompt, [9]),
    ]
    _update(rows, added=added)
    step = _step(rows, [3, 3, 3, 3], [1, 2, 3, 4])
    due = step.due(2)
    assert [one.row for one in due] == [0, 3]
    assert [one.request.policy.thresholds_at(2) for one in due] == [(0.25, 0.625), (0.5, 0.75)]
    step.depth[3] = 2
    assert [one.row for one in step.due(4)] == [0, 1]
    assert step.due(3) == step.due(6) == [], "no exit layers"
    assert step.depth == {3: 2}


def test_exits_only_for_requests_that_begin_among_few() -> None:
    """`--exits-up-to`: what a request begins with stays, whoever joins, and when it comes back."""
    rows = _engine(replace(RULES, exits_up_to=3))
    names = ["a", "b", "c", "d", "e"]
    rows.requests.request_ids = lambda: names

    def modes() -> dict[int, str]:
        return {row: one.policy.mode for row, one in sorted(rows.requests.rows.items())}

    _update(rows, added=[(row, _params(), [5, 6], []) for row in range(3)])
    assert set(modes().values()) == {"confidence"}
    # Row 0 ended and is left empty, row 1 ended and is taken, row 2 goes on, row 3 is new.
    _update(rows, removed=[0], added=[(row, _params(), [5, 6], []) for row in (1, 3)])
    assert set(modes().values()) == {"confidence"}
    _update(rows, added=[(0, _params(), [5, 6], [])])
    assert modes() == {0: "off", 1: "confidence", 2: "confidence", 3: "confidence"}
    _step(rows, [2, 2, 2, 2], [1, 2, 3, 4])
    _update(rows, removed=[0, 1, 2, 3])
    _update(rows, added=[(0, _params(), [5, 6], [7])])
    assert not _step(rows, [2], [1]).due(2), "it came back alone"


def test_prompt_tokens_stay_and_the_token_after_may_exit(rows) -> None:
    """A prompt chunk, the last chunk of a prompt, a decode token."""
    added = [(0, _params(), [5] * 9, []), (1, _params(), [5] * 2, []), (2, _params(), [5] * 2, [7])]
    _update(rows, added=added)
    step = _step(rows, [0, 1, 2, 1, 2], [3, 4, 5])
    assert [one.row for one in step.due(2)] == [2]
    assert step.known_depth is None


def _live_through(rows, depths: list[int], output: list[int]) -> None:
    """Row 0 generates from a prompt of two tokens, each token at the given depth."""
    _update(rows, added=[(0, _params(), [5, 5], output)])
    for position, depth in enumerate(depths, start=1):
        step = _step(rows, [position], [1])
        if depth < 6:
            for layer in (2, 4):
                due = step.due(layer)
                if due and layer == depth:
                    step.depth[0] = layer
        rows.requests.record(step)
        output.append(7)


def test_a_preempted_request_is_recomputed_at_the_depths_it_had(rows) -> None:
    rows.requests.request_ids = lambda: ["a"]
    output: list[int] = []
    _live_through(rows, [6, 4, 6, 2], output)
    _update(rows, removed=[0])
    _update(rows, added=[(0, _params(), [5, 5], output)])
    whole = _step(rows, [0, 1, 2, 3, 4, 5], [6])
    assert whole.known_depth is not None
    assert whole.known_depth.tolist() == [6, 6, 4, 6, 2, 6], "the last token is new"
    assert [one.row for one in whole.due(2)] == [0]
    part = _step(rows, [0, 1, 2], [3])
    assert part.known_depth is not None and part.known_depth.tolist() == [6, 6, 4]
    assert part.due(2) == []
    middle = _step(rows, [4], [1])
    assert middle.known_depth is not None and middle.known_depth.tolist() == [2]
    assert middle.due(2) == [], "computed before, although it is a single token"


def test_another_request_in_the_same_row_has_its_own_past(rows) -> None:
    names = ["a"]
    rows.requests.request_ids = lambda: names
    _live_through(rows, [6, 2, 2], [])
    _update(rows, removed=[0])
    names[0] = "b"
    _update(rows, added=[(0, _params(), [5, 5], [7, 7, 7])])
    assert _step(rows, [0, 1, 2, 3, 4], [5]).known_depth.tolist() == [6] * 5


def test_a_request_that_ended_is_forgotten(rows) -> None:
    rows.requests.request_ids = lambda: ["a"]
    rows.requests.preempted.may_return = lambda name: name != "a"
    _live_through(rows, [6, 2, 2], [])
    _update(rows, removed=[0])
    _update(rows, added=[(0, _params(), [5, 5], [7, 7, 7])])
    assert _step(rows, [0, 1, 2, 3, 4], [5]).known_depth.tolist() == [6] * 5


def test_only_rows_that_are_due_generate(rows) -> None:
    _update(rows, added=[(0, _params(), [5] * 9, []), (1, _params(), [5] * 2, [7])])
    rows.requests.record(_step(rows, [0, 1, 2, 2], [3, 4]))
    assert sum(rows.state.recorder.tokens_by_depth) == 1


def test_bad_fields_that_slipped_through_mean_full_depth(rows) -> None:
    _update(rows, added=[(0, _params(exit_layer=3), [5], [7])])
    assert _step(rows, [1], [1]).due(2) == []


@given(st.data())
def test_rows_follow_their_requests(data: st.DataObject) -> None:
    from vllm.v1.sample.logits_processor import MoveDirectionality

    rows, model, born = _engine(), {}, 0
    for _ in range(data.draw(st.integers(1, 12))):
        kind = data.draw(st.sampled_from(["add", "remove", "move", "swap"]))
        index, other = data.draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))
        if kind == "add":
            born += 1
            _update(rows, added=[(index, _params(), [5] * born, [])])
            model[index] = born
        elif kind == "remove":
            _update(rows, removed=[index])
            model.pop(index, None)
        elif index != other and index in model:
            swap = kind == "swap"
            direction = MoveDirectionality.SWAP if swap else MoveDirectionality.UNIDIRECTIONAL
            _update(rows, moved=[(index, other, direction)])
            mine, theirs = model.pop(index), model.pop(other, None)
            model[other] = mine
            if swap and theirs is not None:
                model[index] = theirs
    found = {index: row.prompt_length for index, row in rows.requests.rows.items()}
    assert found == model
