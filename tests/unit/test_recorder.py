"""Counts and traces where the forward pass runs."""

from __future__ import annotations

import copy
import json
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitserve.engine.recorder import Recorder, TraceKeys, check_trace
from exitserve.errors import LONGEST_LINE, ExitServeError


def test_counts() -> None:
    recorder = Recorder(num_layers=6, exit_layers=(2, 4))
    recorder.count_checks(2, checks=5, passed=3)
    recorder.count_checks(4, checks=2, passed=0)
    recorder.frozen_tokens += 2
    recorder.deferred_layers += 4
    recorder.count_judged(drafts=3, accepted=1, from_text=False)
    recorder.count_judged(drafts=4, accepted=4, from_text=True)
    recorder.layer_reads += 6
    for depth in (2, 2, 2, 6, 6):
        recorder.tokens_by_depth[depth] += 1
    assert recorder.snapshot() == {
        "num_layers": 6,
        "exit_layers": [2, 4],
        "tokens_by_depth": {1: 0, 2: 3, 3: 0, 4: 0, 5: 0, 6: 2},
        "checks": {2: 5, 4: 2},
        "passed": {2: 3, 4: 0},
        "head_passes": 2,
        "frozen_tokens": 2,
        "deferred_layers": 4 + 2 * 6,
        "drafted_tokens": 7,
        "accepted_tokens": 5,
        "drafted_from_text": 4,
        "accepted_from_text": 4,
        "layer_reads": 6,
        "final_heads": 0,
    }


def test_traces_are_taken_once_and_keep_requests_apart() -> None:
    recorder = Recorder(6, (2,))
    recorder.trace(["key"], "a", index=0, depth=6)
    recorder.trace(["key"], "b", index=0, depth=6)
    recorder.trace(["key"], "b", index=1, depth=2, source="text")
    assert recorder.take_traces("key") == {"a": {0: (6, "")}, "b": {0: (6, ""), 1: (2, "text")}}
    assert recorder.take_traces("key") == {}


MOST = 6
# In each step some abandoned requests begin; those that run add a token each.
STEPS = st.lists(st.integers(0, MOST - 3), max_size=30)


@given(running=st.integers(1, 3), steps=STEPS)
def test_requests_that_run_keep_their_traces(running: int, steps: list[int]) -> None:
    """However old they are, and however many others came and were never asked about."""
    recorder = Recorder(6, (2,))
    begun = 0
    with patch("exitserve.engine.recorder.MAX_TRACES", MOST):
        for index, abandoned in enumerate(steps):
            for number in range(running):
                recorder.trace([f"runs-{number}"], "a", index=index, depth=6)
            for _ in range(abandoned):
                recorder.trace([f"left-{begun}"], "a", index=0, depth=2)
                begun += 1
    for number in range(running):
        found = recorder.take_traces(f"runs-{number}")
        assert found == ({"a": dict.fromkeys(range(len(steps)), (6, ""))} if steps else {})
    assert sum(bool(recorder.take_traces(f"left-{one}")) for one in range(begun)) <= MOST


def test_what_nobody_collects_takes_little_memory() -> None:
    """However long the answers were whose clients hung up."""
    recorder = Recorder(6, (2,))
    with patch("exitserve.engine.recorder.MAX_TRACED_TOKENS", 100):
        for number in range(9):
            for index in 2 * [*range(30)]:
                recorder.trace([f"left-{number}"], "a", index=index, depth=2)
            recorder.take_traces(f"left-{number - 5}")
    kept = [number for number in range(9) if recorder.take_traces(f"left-{number}")]
    assert kept == [6, 7, 8]


@pytest.mark.parametrize("value", [2, -1, 0.5, "key", [True], "x" * 100_000])
def test_a_trace_is_asked_for_with_true(value: object) -> None:
    with pytest.raises(ExitServeError, match="exit_trace must be true or false") as caught:
        check_trace(value, of_client=False)
    assert len(str(caught.value)) <= LONGEST_LINE


@pytest.mark.parametrize("keys", [["k"] * 5, ["k" * 129], tuple("abcde")])
def test_the_keys_of_a_trace_are_few_and_short(keys: list[str]) -> None:
    with pytest.raises(ExitServeError, match="at most 4 keys of at most 128 characters"):
        check_trace(keys, of_client=False)


def test_only_the_server_names_traces() -> None:
    made = TraceKeys(["key"])
    for value in (None, 0, 1, True, False, made, copy.deepcopy(made)):
        check_trace(value, of_client=True)
    for forged in (["key"], ("key",), json.loads(json.dumps(made))):
        with pytest.raises(ExitServeError, match="exit_trace must be true or false"):
            check_trace(forged, of_client=True)
