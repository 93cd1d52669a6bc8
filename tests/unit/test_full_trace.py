"""Full traces: their texts, their file, how a response carries them, and what the oracle says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitserve.cli import main
from exitserve.engine.options import LOOPS, make_rules
from exitserve.errors import ExitServeError
from exitserve.policy import ExitPolicy, ExitRules
from exitserve.reference import load_reference
from exitserve.server.full_trace import FullTrace
from exitserve.server.response_fields import ExitFields, RequestTrace
from exitserve.tracing.format import TokenTexts, noted_layers, read_trace, schema

ROOT = Path(__file__).parents[2]
LAYERS = (2, 4, 6)
LLAMA = {"model_type": "llama", "num_attention_heads": 4, "intermediate_size": 128}
PROMPT = "the quick brown fox"


class Bytes:
    """A tokenizer whose tokens are bytes, so that characters may take several."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(token_ids).decode(errors="replace")


CHARACTERS = st.characters(codec="utf-8", exclude_characters="\ufffd")
"""Without the one that stands for an incomplete character."""


@given(st.text(CHARACTERS, max_size=20), st.text(CHARACTERS, max_size=20))
def test_texts_joined_are_the_text(prompt: str, answer: str) -> None:
    texts = TokenTexts(Bytes().decode, prompt.encode())
    assert "".join(texts.add(one) for one in answer.encode()) == answer


def test_what_became_of_a_token_at_each_layer() -> None:
    notes = [(2, None, None, None), (4, 97, 0.75, 0.5)]
    found = noted_layers(4, notes, LAYERS, chr)
    assert [(one.layer, one.outcome) for one in found] == [
        (2, "screened"),
        (4, "stopped"),
        (6, "not_reached"),
    ]
    assert (found[1].text, found[1].confidence, found[1].threshold) == ("a", 0.75, 0.5)
    deep = noted_layers(6, [(4, 97, 0.25, 0.5), (6, 98, 0.5, None)], LAYERS, chr)
    assert [one.outcome for one in deep] == ["unchecked", "went_on", "stopped"]
    drafted = noted_layers(6, [(2, 97, 0.75, 0.5), (6, 98, 0.5, None)], LAYERS, chr)
    assert [one.outcome for one in drafted] == ["drafted", "unchecked", "stopped"]


def _events(parts: list[tuple[dict[int, int], dict[int, Any]]]) -> list[dict[str, Any]]:
    """The chunks of a stream of four tokens, whose traces come in these parts."""
    name, given = "cmpl-abc-0-12345678", iter(parts)
    now: list[Any] = [{}, {}]

    async def take() -> dict[str, Any]:
        now[:] = next(given, ({}, {}))
        return {name: now[0]}

    async def take_notes() -> dict[str, Any]:
        return {name: now[1]}

    trace = RequestTrace(
        take,
        samples=1,
        chat=False,
        num_layers=6,
        keep_token_ids=False,
        full=FullTrace(Bytes(), LAYERS),
        take_notes=take_notes,
    )

    async def source() -> AsyncIterator[str]:
        for number, ids in enumerate(([97], [98, 99], [100])):
            choice = {"index": 0, "text": bytes(ids).decode(), "token_ids": ids}
            choice["finish_reason"] = "length" if number == 2 else None
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
        yield "data: [DONE]\n\n"

    async def collect() -> list[str]:
        return [event async for event in ExitFields(trace).stream(source())]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("exitserve.server.response_fields.PACE_SECONDS", -1)
        events = asyncio.run(collect())
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def test_a_stream_tells_tokens_as_they_are_known() -> None:
    """Each once and in order, and none that was not sent."""
    notes: dict[int, Any] = {index: ([(2, 97, 0.9, 0.5)], []) for index in (1, 2)}
    notes |= {0: ([], []), 3: ([(6, 98, 0.4, None)], [(2, 99, False), (4, 100, False)])}
    parts = [({0: 6, 1: 2}, {0: notes[0], 1: notes[1]}), ({}, {}), ({2: 2, 3: 6, 4: 6}, notes)]
    chunks = _events(parts)
    told = [[t["index"] for t in _tokens(chunk)] for chunk in chunks]
    assert told == [[0], [1], [2, 3]]
    last = chunks[-1]["choices"][0]
    assert last["exit_layers"] == [6, 2, 2, 6]
    assert last["exit_trace"]["version"] == 2
    assert [token["text"] for token in last["exit_trace"]["tokens"]] == ["c", "d"]
    assert last["exit_trace"]["tokens"][1]["layers"][-1] == {
        "layer": 6,
        "outcome": "stopped",
        "token_id": 98,
        "text": "b",
        "confidence": 0.4,
    }
    assert [token.get("drafts") for token in last["exit_trace"]["tokens"]] == [
        None,
        [
            {"layer": 2, "token_id": 99, "text": "c", "accepted": False},
            {"layer": 4, "token_id": 100, "text": "d", "accepted": False},
        ],
    ]


def _tokens(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    found: dict[str, Any] = chunk["choices"][0].get("exit_trace") or {"tokens": []}
    return found["tokens"]


def test_a_trace_with_a_token_missing_is_null() -> None:
    chunks = _events([({0: 6}, {}), ({2: 2, 3: 2}, {})])
    assert chunks[-1]["choices"][0]["exit_trace"] is None


def test_servers_refuse_what_they_cannot_tell() -> None:
    ExitRules(num_layers=6, exit_layers=(2, 4)).check_full_trace()
    config = {"num_hidden_layers": 6, "hidden_size": 64, "vocab_size": 100, **LLAMA}
    loops = {one: make_rules(config, {"exit_path": one, "exit_layers": [2]}) for one in LOOPS}
    told = {one for one, rules in loops.items() if rules.full_trace}
    assert told == {"host", "masked"}
    captured = loops["device"]
    with pytest.raises(ExitServeError, match=r"the host decides.*send exit_trace true"):
        captured.check_full_trace()


@pytest.mark.parametrize("mode", ["confidence", "defer", "off"])
def test_watching_changes_nothing(make_checkpoint, mode: str) -> None:
    """What is looked at beyond a token's exit leaves no key or value behind."""
    reference = load_reference(str(make_checkpoint("llama")))
    policy = ExitPolicy.off() if mode == "off" else ExitPolicy.confidence(0.1, mode=mode)
    ids = [ord(c) for c in PROMPT]
    decoded = reference.decode(ids, 16, policy)
    seen = list(reference.watch(ids, 16, policy))
    assert [one.token_id for one in seen] == decoded.token_ids
    assert [one.depth for one in seen] == decoded.exit_layers
    for one in seen:
        assert [look.layer for look in one.by_layer] == [2, 4, 6]
        (there,) = [look for look in one.by_layer if look.layer == one.depth]
        assert there.token_id == one.token_id
        above = [look for look in one.by_layer if look.is_checked and look.layer < one.depth]
        assert all(look.confidence <= look.threshold for look in above)


def test_watching_drafts(make_checkpoint) -> None:
    """The rounds of `decode`; a draft that full depth accepted is the token, one that it rejected
    is not."""
    reference = load_reference(str(make_checkpoint("llama")), exit_checks="all")
    policy, ids = ExitPolicy.confidence(0.1, mode="verify"), [ord(c) for c in PROMPT]
    decoded = reference.decode(ids, 40, policy, num_drafts=3)
    seen = list(reference.watch(ids, 40, policy, num_drafts=3))
    assert [one.token_id for one in seen] == decoded.token_ids
    assert {one.depth for one in seen} == {6}
    drafts = [one for looks in seen for one in looks.drafts]
    assert (len(drafts), sum(stands for *_, stands in drafts)) == (
        decoded.drafted,
        decoded.accepted,
    )
    assert 0 < decoded.accepted < decoded.drafted
    for looks in filter(lambda one: one.drafts, seen):
        layer, token, stands = looks.drafts[0]
        (there,) = [look for look in looks.by_layer if look.layer == layer]
        assert there.passes and there.is_checked and there.token_id == token
        assert stands == (token == looks.token_id)
        assert not any(look.is_checked for look in looks.by_layer if look.layer > layer)


def test_the_command_writes_what_the_schema_says(make_checkpoint, tmp_path: Path) -> None:
    import jsonschema

    model, out = make_checkpoint("llama"), tmp_path / "trace.json"
    arguments = ["trace", str(model), "--prompt", PROMPT, "--out", str(out), "--max-tokens", "12"]
    assert main([*arguments, "--exit-threshold", "0.1"]) == 0
    written = json.loads(out.read_text())
    jsonschema.validate(written, schema())
    trace = read_trace(out)
    assert trace.prompt == PROMPT and trace.fields == {"exit_threshold": 0.1}
    assert all(look.text is not None for token in trace.tokens for look in token.layers)
    assert min(token.depth for token in trace.tokens) < 6
    assert main(arguments) == 2, "it would replace a file"
    drafting = ["--mode", "verify", "--exit-threshold", "0.08", "--exit-checks", "all"]
    assert main([*arguments, *drafting, "--overwrite"]) == 0
    jsonschema.validate(json.loads(out.read_text()), schema())
    drafted = [token for token in read_trace(out).tokens if token.drafts]
    assert drafted and {token.depth for token in drafted} == {6}
    assert main([*arguments, "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt", "", "--out", "t.json"], "the prompt is empty"),
        (["--prompt", "x", "--out", "t.json", "--exit-threshold", "-1"], "finite number above 0"),
        (["--prompt", "x", "--out", "t.json", "--exit-layer", "5"], "exit layers (2, 4)"),
        (["--prompt", "x", "--out", "t.json", "--max-tokens", "0"], "at least 1"),
        (["--prompt", "x", "--out", "t.json", "--max-tokens", "900"], "context of 256"),
        (["--prompt-file", "no.txt", "--out", "t.json"], "cannot read --prompt-file"),
        (["--prompt", "x", "--out", "/proc/none/t.json"], "cannot make output folder"),
        (["--prompt", "x", "--out", "."], "is a folder; give a file"),
    ],
)
def test_bad_arguments(make_checkpoint, capsys, arguments: list[str], says: str) -> None:
    assert main(["trace", str(make_checkpoint("llama")), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert says in line


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    for text, says in (("{", "Invalid JSON"), ('{"version": 3}', "version"), ("[]", "the file")):
        file = tmp_path / "trace.json"
        file.write_text(text)
        with pytest.raises(ExitServeError, match="is no trace of version 1 or 2") as error:
            read_trace(file)
        assert says in str(error.value) and "exitserve trace" in str(error.value)
    with pytest.raises(ExitServeError, match="cannot read the trace"):
        read_trace(tmp_path / "none.json")


def test_the_schema_in_the_documentation_is_ours() -> None:
    assert json.loads((ROOT / "docs" / "trace.schema.json").read_text()) == schema()
