"""`/openapi.json` describes what the server answers, and what requests may ask."""

from typing import Any

import httpx
import jsonschema
import pytest

from exitserve import __version__
from exitserve.policy import FIELDS

from ..forks import LocalServer

NAME = "exit-py"
ASKED = {"exit_threshold": 0.4, "exit_trace": True}
COMPLETION = {"model": NAME, "prompt": "def read", "max_tokens": 4, "logprobs": 1}
CHAT = {
    "model": NAME,
    "messages": [{"role": "user", "content": "def read"}],
    "max_tokens": 4,
    "logprobs": True,
}


@pytest.fixture(scope="module")
def document(server: LocalServer) -> Any:
    return httpx.get(f"{server.url}/openapi.json", timeout=60).json()


def check(document: Any, route: str, method: str, answer: Any) -> None:
    """Validates an answer against the description of its route."""
    content = document["paths"][route][method]["responses"]["200"]["content"]
    schema = content["application/json"]["schema"]
    jsonschema.validate(answer, schema | {"components": document["components"]})


def test_the_document_is_ours(document: Any) -> None:
    assert document["info"]["title"] == "exitserve"
    assert document["info"]["version"] == __version__


@pytest.mark.parametrize(
    "request_type", ["CompletionRequest", "ChatCompletionRequest", "ResponsesRequest"]
)
def test_requests_name_our_fields(document: Any, request_type: str) -> None:
    xargs = document["components"]["schemas"][request_type]["properties"]["vllm_xargs"]
    (known,) = (kind for kind in xargs["anyOf"] if kind["type"] == "object")
    assert list(known["properties"]) == list(FIELDS)
    whole = known | {"components": document["components"]}
    jsonschema.validate({**ASKED, "another": 1}, whole)
    for wrong in ({"exit_mode": "fast"}, {"exit_layer": 0}, {"exit_target": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, whole)


@pytest.mark.parametrize(
    ("route", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
)
def test_responses_are_what_is_described(
    document: Any, server: LocalServer, route: str, body: dict[str, Any]
) -> None:
    for xargs in (ASKED, {}):
        sent = httpx.post(f"{server.url}{route}", json=body | {"vllm_xargs": xargs}, timeout=60)
        assert sent.status_code == 200, sent.text
        check(document, route, "post", sent.json())
    answer = sent.json() | {"exit_metrics": {"tokens": "four"}}
    with pytest.raises(jsonschema.ValidationError):
        check(document, route, "post", answer)
    assert "422" not in document["paths"][route]["post"]["responses"]


def test_stats_are_what_is_described(document: Any, server: LocalServer) -> None:
    stats = httpx.get(f"{server.url}/exitserve/stats", timeout=60).json()
    check(document, "/exitserve/stats", "get", stats)
    with pytest.raises(jsonschema.ValidationError):
        check(document, "/exitserve/stats", "get", stats | {"tokens_in_all": 1})
