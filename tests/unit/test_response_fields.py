"""Response fields: which choice a trace belongs to, and how streams carry it."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitserve.server.response_fields import ExitFields, RequestTrace, Traced, choice_index

BASE = "cmpl-abc"


@pytest.mark.parametrize(
    ("request_id", "samples", "chat", "index"),
    [
        ("cmpl-abc-0-12345678", 1, False, 0),
        ("cmpl-abc-2-12345678", 1, False, 2),
        ("1_cmpl-abc-2-12345678", 3, False, 7),
        ("cmpl-user-7-0-0123abcd", 1, False, 0),
        ("chatcmpl-abc-12345678", 1, True, 0),
        ("2_chatcmpl-abc-12345678", 3, True, 2),
    ],
)
def test_choices(request_id: str, samples: int, chat: bool, index: int) -> None:
    assert choice_index(request_id, samples, chat=chat) == index


def _fields(*parts: dict[str, dict[int, int]], keep: bool = False) -> ExitFields:
    answers = iter(parts)

    async def take() -> dict[str, Traced]:
        # Every second token was drafted.
        return {
            name: {index: (depth, "text" * (index % 2)) for index, depth in depths.items()}
            for name, depths in next(answers, {}).items()
        }

    return ExitFields(RequestTrace(take, samples=2, chat=False, num_layers=6, keep_token_ids=keep))


def _chunk(index: int, tokens: list[int], finish: str | None = None) -> str:
    choice = {"index": index, "text": "t", "token_ids": tokens, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


def _stream(fields: ExitFields, events: list[str]) -> list[str]:
    async def source() -> AsyncIterator[str]:
        for event in events:
            yield event

    async def collect() -> list[str]:
        return [event async for event in fields.stream(source())]

    return asyncio.run(collect())


def _body(event: str) -> dict:
    return json.loads(event.removeprefix("data: "))


def test_a_stream_of_two_samples() -> None:
    fields = _fields(
        {f"0_{BASE}-0-12345678": {0: 6, 1: 2}, f"1_{BASE}-0-12345678": {0: 6}},
        {f"1_{BASE}-0-12345678": {1: 4, 2: 2}},
    )
    events = [
        _chunk(0, [7]),
        _chunk(1, [7]),
        _chunk(0, [8], "length"),
        _chunk(1, [8]),
        _chunk(1, [9], "stop"),
        "data: [DONE]\n\n",
    ]
    sent = _stream(fields, events)
    assert len(sent) == len(events) and sent[-1] == events[-1]
    assert _body(sent[2])["choices"][0]["exit_layers"] == [6, 2]
    assert "exit_metrics" not in _body(sent[2])
    assert _body(sent[4])["choices"][0]["exit_layers"] == [6, 4, 2]
    assert _body(sent[4])["exit_metrics"]["tokens"] == 5
    assert _body(sent[4])["exit_metrics"]["accepted_drafts"] == {"text": 2}
    assert all("token_ids" not in _body(event)["choices"][0] for event in sent[:-1])


def test_tokens_past_a_stop_string_are_cut() -> None:
    fields = _fields({f"{BASE}-0-12345678": {0: 6, 1: 2, 2: 2, 3: 2}})
    sent = _stream(fields, [_chunk(0, [7, 8], "stop"), "data: [DONE]\n\n"])
    assert _body(sent[0])["choices"][0]["exit_layers"] == [6, 2]


def test_errors_and_keep_alives_pass_through() -> None:
    events = [": keep-alive\n\n", 'data: {"error": {"message": "x"}}\n\n', "data: [DONE]\n\n"]
    assert _stream(_fields(), events) == events


def test_a_keep_alive_does_not_part_the_last_chunk_from_its_totals() -> None:
    usage = 'data: {"choices": [], "usage": {}}\n\n'
    fields = _fields({f"{BASE}-0-12345678": {0: 6}})
    sent = _stream(fields, [_chunk(0, [7], "stop"), ": keep-alive\n\n", usage])
    assert sent[0] == ": keep-alive\n\n"
    assert _body(sent[1])["exit_metrics"] == _body(sent[2])["exit_metrics"]


def test_logprobs_are_labelled_without_a_trace() -> None:
    fields = ExitFields(logprobs_from_exits=True)
    events = [_chunk(0, [7]), _chunk(0, [8], "stop"), "data: [DONE]\n\n"]
    sent = _stream(fields, events)
    assert sent[0] == events[0] and sent[2] == events[2]
    assert _body(sent[1]) == _body(events[1]) | {"logprobs_from": "exit_layer"}
    body = {"choices": [{"index": 0, "finish_reason": "stop"}]}
    assert asyncio.run(fields.response(body)) == body | {"logprobs_from": "exit_layer"}


@given(
    st.lists(st.integers(1, 6), max_size=8),
    st.sets(st.integers(0, 7)),
    st.integers(0, 8),
    st.booleans(),
)
def test_depths_are_all_there_or_none_are(
    depths: list[int], lost: set[int], count: int, tells_ids: bool
) -> None:
    """Whatever was lost of a trace: no depth is told for another token's."""
    count = min(count, len(depths))
    known = {index: depth for index, depth in enumerate(depths) if index not in lost}
    fields = _fields({f"{BASE}-0-12345678": known})
    choice = {"index": 0, "finish_reason": "stop"} | (
        {"token_ids": [7] * count} if tells_ids else {}
    )
    body = asyncio.run(fields.response({"choices": [choice]}))
    told = body["choices"][0]["exit_layers"]
    if tells_ids:
        whole = not lost & set(range(count))
        assert told == (depths[:count] if whole else None)
    else:  # how many there were is not known, but where one is missing between others is
        assert told is None or told == depths[: len(told)]
    assert (body["exit_metrics"] is None) == (told is None)


def test_a_stream_without_its_trace_is_whole() -> None:
    """The engine is gone, or refuses: the answer's chunks come in order, to their end."""
    usage = 'data: {"choices": [], "usage": {}}\n\n'
    events = [_chunk(0, [7]), _chunk(1, [7], "stop"), _chunk(0, [8], "length"), usage]
    events.append("data: [DONE]\n\n")
    sent = _stream(_fields(), events)
    assert [_parts(event) for event in sent] == [_parts(event) for event in events]
    assert _body(sent[1])["choices"][0]["exit_layers"] is None
    assert _body(sent[2])["choices"][0]["exit_layers"] is None
    assert _body(sent[2])["exit_metrics"] is _body(sent[3])["exit_metrics"] is None


def _parts(event: str) -> Any:
    """Which choice a chunk is of, and whether it finishes that; other events as they are."""
    if "choices" not in event:
        return event
    return [(one["index"], one["finish_reason"]) for one in _body(event)["choices"]]
