"""Rows follow vLLM's persistent batch, and plans follow the rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exitserve.policy import ExitPolicy, ExitRules

RULES = ExitRules(num_layers=6, exit_layers=(2, 4), default=ExitPolicy.confidence(0.5))


@pytest.fixture
def rows():
    from exitserve.engine.rows import Rows

    return Rows(RULES, torch.tensor([1]))


def _params(**fields):
    from vllm import SamplingParams

    return SamplingParams(extra_args=fields or None)


def _update(rows, removed=(), added=(), moved=()) -> None:
    from vllm.v1.sample.logits_processor import BatchUpdate

    rows.update(BatchUpdate(batch_size=8, removed=removed, added=added, moved=moved))


def _plan(rows, positions: list[int], row_ends: list[int]):
    from exitserve.engine.compat import BatchShape

    return rows.plan(BatchShape(len(positions), torch.tensor(row_ends)), torch.tensor(positions))


def test_each_row_has_its_own_thresholds(rows) -> None:
    prompt = [5, 6, 7]
    added = [
        (0, _params(exit_threshold=0.25), prompt, []),
        (1, _params(exit_layer=4), prompt, []),
        (2, _params(exit_threshold=1), prompt, []),
        (3, _params(), prompt, []),
    ]
    _update(rows, added=added)
    plan = _plan(rows, [3, 3, 3, 3], [1, 2, 3, 4])
    inf = math.inf
    assert plan.thresholds.tolist() == [[0.25, inf, inf, 0.5], [0.25, -1.0, inf, 0.5]]
    assert plan.eos_thresholds[0].tolist() == [0.625, inf, inf, 0.75]
    assert plan.candidates(2).tolist() == [0, 3]
    plan.freeze(torch.tensor([3]), 2, torch.zeros(1, 8))
    assert plan.candidates(4).tolist() == [0, 1]
    assert plan.depth.tolist() == [6, 6, 6, 2]


def test_prompt_tokens_stay_and_recomputed_tokens_may_exit(rows) -> None:
    """A prompt chunk, a decode token, and a preempted request recomputed in one chunk."""
    added = [
        (0, _params(), [5] * 9, []),
        (1, _params(), [5] * 2, [7]),
        (2, _params(), [5] * 2, [7, 8]),
    ]
    _update(rows, added=added)
    plan = _plan(rows, [0, 1, 2, 2, 0, 1, 2, 3], [3, 4, 8])
    assert plan.candidates(2).tolist() == [3, 6, 7]


def test_only_rows_that_are_due_generate(rows) -> None:
    _update(rows, added=[(0, _params(), [5] * 9, []), (1, _params(), [5] * 2, [7])])
    rows.record(_plan(rows, [0, 1, 2, 2], [3, 4]))
    assert sum(rows.recorder.tokens_by_depth) == 1


def test_bad_fields_that_slipped_through_mean_full_depth(rows) -> None:
    _update(rows, added=[(0, _params(exit_layer=3), [5], [])])
    assert _plan(rows, [4], [1]).candidates(2).numel() == 0


@given(st.data())
def test_rows_follow_their_requests(data: st.DataObject) -> None:
    from vllm.v1.sample.logits_processor import MoveDirectionality

    from exitserve.engine.rows import Rows

    rows, model, born = Rows(RULES, torch.tensor([1])), {}, 0
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
    lengths = rows._gather(6)[2].tolist()
    assert lengths == [model.get(index, 0) for index in range(6)]
