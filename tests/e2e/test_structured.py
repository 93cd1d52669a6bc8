"""Grammars and tools: valid output at every depth, full depth unless the request asks for exits."""

import json
import re
from typing import Any

import pytest

NAME = "exit-py"
MESSAGES = [{"role": "user", "content": "def read_lines(path):\n    with open(path"}]
FULL_DEPTH = 24
EARLY = {"exit_layer": 6}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 4, "maxLength": 12},
        "size": {"enum": ["small", "large"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size", "count"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file.",
        "parameters": SCHEMA,
        "strict": True,
    },
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "file", "schema": SCHEMA}}
DEPTHS = pytest.mark.parametrize("fields", [{}, EARLY], ids=["default", "early"])


def chat(client: Any, fields: dict[str, Any], **options: Any) -> dict[str, Any]:
    answer = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        max_tokens=200,
        temperature=0,
        logprobs=True,
        extra_body={"vllm_xargs": fields | {"exit_trace": True}},
        **options,
    )
    return answer.model_dump()


def check_depth(answer: dict[str, Any], fields: dict[str, Any]) -> None:
    """Full depth by default, exits where asked for; and the label of log-probabilities agrees."""
    (choice,) = answer["choices"]
    assert choice["finish_reason"] in ("stop", "tool_calls")
    assert len(choice["exit_layers"]) == answer["usage"]["completion_tokens"]
    assert (min(choice["exit_layers"]) < FULL_DEPTH) is bool(fields)
    assert ("logprobs_from" in answer) is bool(fields)


def check_value(text: str) -> None:
    value = json.loads(text)
    assert value.keys() == {"name", "size", "count"}
    assert 4 <= len(value["name"]) <= 12
    assert value["size"] in ("small", "large") and 0 <= value["count"] <= 99


@DEPTHS
def test_a_json_schema(early_client, fields: dict[str, Any]) -> None:
    answer = chat(early_client, fields, response_format=JSON_SCHEMA)
    check_value(answer["choices"][0]["message"]["content"])
    check_depth(answer, fields)


@DEPTHS
@pytest.mark.parametrize(
    ("grammar", "valid"),
    [
        ({"json": SCHEMA}, None),
        ({"regex": r"[a-f]{8}-[0-9]{4}-[a-f]{8}-[0-9]{4}"}, r"[a-f]{8}-[0-9]{4}-[a-f]{8}-[0-9]{4}"),
        ({"choice": ["return a thousand times", "never again in a lifetime"]}, "(return|never) .*"),
        ({"grammar": 'root ::= "self." [a-z]{9} " = " [a-z]{9}'}, r"self\.[a-z]{9} = [a-z]{9}"),
    ],
    ids=["json", "regex", "choice", "grammar"],
)
def test_structured_outputs_of_completions(
    early_client, fields: dict[str, Any], grammar: dict[str, Any], valid: str | None
) -> None:
    answer = early_client.completions.create(
        model=NAME,
        prompt="x = ",
        max_tokens=200,
        temperature=0,
        logprobs=1,
        extra_body={"structured_outputs": grammar, "vllm_xargs": fields | {"exit_trace": True}},
    ).model_dump()
    text = answer["choices"][0]["text"]
    if valid is None:
        check_value(text)
    else:
        assert re.fullmatch(valid, text)
    check_depth(answer, fields)


@pytest.fixture(scope="module")
def no_blanks(bundled) -> dict[str, int]:
    """Logit biases against tokens of nothing but blanks, which a tool's grammar lets go on."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bundled)
    return {
        str(token): -100 for token in range(len(tokenizer)) if not tokenizer.decode([token]).strip()
    }


@DEPTHS
@pytest.mark.parametrize(
    "choice",
    [{"type": "function", "function": {"name": "read_file"}}, "required"],
    ids=["named", "required"],
)
def test_tools(early_client, no_blanks, fields: dict[str, Any], choice: Any) -> None:
    answer = chat(
        early_client,
        fields,
        tools=[TOOL],
        tool_choice=choice,
        logit_bias=no_blanks,
        parallel_tool_calls=False,
    )
    calls = answer["choices"][0]["message"]["tool_calls"]
    assert calls
    for call in calls:
        assert call["function"]["name"] == "read_file"
        check_value(call["function"]["arguments"])
    check_depth(answer, fields)


@pytest.mark.parametrize("kind", ["json", "regex", "grammar"])
def test_a_malformed_grammar_is_the_clients_mistake(early_client, kind: str) -> None:
    from openai import BadRequestError

    broken = {"json": '{"type": ', "regex": "(", "grammar": "root ::= ("}
    with pytest.raises(BadRequestError):
        early_client.completions.create(
            model=NAME,
            prompt="x",
            max_tokens=4,
            extra_body={"structured_outputs": {kind: broken[kind]}, "vllm_xargs": EARLY},
        )
    assert early_client.completions.create(model=NAME, prompt="x", max_tokens=2).choices
