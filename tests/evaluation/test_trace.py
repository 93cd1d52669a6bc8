"""Full traces: their texts, their file, and what the oracle says."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitserve.cli import main
from exitserve.evaluation.trace import schema, text_added
from exitserve.policy import ExitPolicy
from exitserve.reference import load_reference

ROOT = Path(__file__).parents[2]
PROMPT = "the quick brown fox"


@given(st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=20))
def test_texts_joined_are_the_text(text: str) -> None:
    """Of a tokenizer whose tokens are bytes, so that characters may take several."""
    known, ids = "", text.encode()
    for end in range(len(ids)):
        known += text_added(known, ids[: end + 1].decode(errors="replace"))
    assert known == text


@pytest.mark.parametrize("mode", ["confidence", "defer", "verify", "off"])
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


def test_the_command_writes_what_the_schema_says(make_checkpoint, tmp_path: Path) -> None:
    import jsonschema

    arguments = ["eval", str(make_checkpoint("llama")), "--prompt", PROMPT, "--out", str(tmp_path)]
    arguments += ["--thresholds", "0.08", "--modes", "confidence,verify"]
    assert main(arguments) == 0
    files = sorted(tmp_path.glob("trace-*.json"))
    early, drafted = (json.loads(file.read_text()) for file in files)
    for written in (early, drafted):
        jsonschema.validate(written, schema())
        assert written["prompt"] == PROMPT and written["fields"]["exit_threshold"] == 0.08
    assert min(token["depth"] for token in early["tokens"]) < 6
    assert {token["depth"] for token in drafted["tokens"]} == {6}
    first, *others = drafted["tokens"]
    assert "drafts" not in first
    for token in others:
        (draft,), (there, *_) = token["drafts"], token["layers"]
        assert there["outcome"] == "drafted" and draft["layer"] == there["layer"] == 2
        assert draft["token_id"] == there["token_id"]
        assert draft["accepted"] == (there["token_id"] == token["token_id"])
    assert not (tmp_path / "report.json").exists()


def test_the_schema_in_the_documentation_is_ours() -> None:
    assert json.loads((ROOT / "docs" / "trace.schema.json").read_text()) == schema()
