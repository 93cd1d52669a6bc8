"""What a request passes before its route: vLLM's real app, without an engine behind it."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.serve.utils.api_utils import load_aware_call

from exitserve.errors import LONGEST_LINE
from exitserve.policy import ExitRules
from exitserve.server.command import parse_vllm_args
from exitserve.server.front_door import MOST_NESTED, nesting

ROOT = Path(__file__).parents[2]
RULES = ExitRules(num_layers=12, exit_layers=(3, 6, 9))
KEY = "open sesame"
OPEN = {
    "/docs",
    "/docs/oauth2-redirect",
    "/exitserve/stats",
    "/health",
    "/kv_event_sources",
    "/load",
    "/metrics",
    "/openapi.json",
    "/ping",
    "/redoc",
    "/version",
}
"""What docs/deploy.md says is open where a key is set."""

MakeApp = Callable[..., FastAPI]


@pytest.fixture(scope="module")
def make_app(bundled: Path) -> MakeApp:
    def make(*flags: str) -> FastAPI:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("VLLM_PLUGINS", "exitserve")
            args = parse_vllm_args(str(bundled), list(flags))
            app = build_app(args, ("generate", "render"))
        state = {"rules": RULES, "stops": False, "open_requests": 0, "unsampled": False}
        app.state.exitserve = SimpleNamespace(**state)
        return app

    return make


@pytest.fixture(scope="module")
def guarded(make_app: MakeApp) -> FastAPI:
    return make_app("--api-key", KEY)


@pytest.fixture(scope="module")
def client(make_app: MakeApp) -> TestClient:
    return TestClient(make_app())


def routes(app: FastAPI, method: str) -> set[str]:
    return {one.path for one in app.routes if method in (getattr(one, "methods", None) or ())}


def test_with_a_key_every_post_needs_it(guarded: FastAPI) -> None:
    client = TestClient(guarded)
    posts = routes(guarded, "POST")
    assert {"/invocations", "/generative_scoring", "/tokenize", "/v1/completions"} <= posts
    for headers in ({}, {"authorization": "Bearer wrong"}):
        answers = {path: client.post(path, json={}, headers=headers) for path in posts}
        assert {path: one.status_code for path, one in answers.items()} == dict.fromkeys(posts, 401)


def test_what_stays_open_is_documented(guarded: FastAPI) -> None:
    client = TestClient(guarded, raise_server_exceptions=False)
    paths = routes(guarded, "GET")
    refused = {path for path in paths if client.get(path).status_code == 401}
    assert paths - refused == OPEN
    page = (ROOT / "docs" / "deploy.md").read_text()
    assert [path for path in OPEN if f"`{path}`" not in page] == []


def test_what_vllm_attached_to_an_answer_stays(make_app: MakeApp, monkeypatch) -> None:
    """Its headers, and the task that counts the request out."""
    app = make_app()
    app.state.enable_server_load_tracking = True

    @load_aware_call
    async def answered(request: Any, raw_request: Any) -> JSONResponse:
        return JSONResponse({"choices": []}, headers={"endpoint-load-metrics": "as asked"})

    monkeypatch.setattr("exitserve.server.routes.vllm_completion", answered)
    client = TestClient(app)
    asked = {"prompt": "x", "logprobs": 1, "vllm_xargs": {"exit_threshold": 0.5}}
    answer = client.post("/v1/completions", json=asked)
    assert answer.json() == {"choices": [], "logprobs_from": "exit_layer"}
    assert answer.headers["endpoint-load-metrics"] == "as asked"
    assert client.get("/load").json() == {"server_load": 0}


def deep(shape: str, depth: int) -> str:
    array, nested = "[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth
    return {
        "array": array,
        "object": nested,
        "prompt": f'{{"model": "m", "prompt": {array}, "messages": {array}, "input": {array}}}',
        "exit field": f'{{"prompt": "x", "vllm_xargs": {{"exit_threshold": {nested}}}}}',
        "transfer": f'{{"prompt": "x", "kv_transfer_params": {nested}}}',
    }[shape]


@pytest.mark.parametrize("depth", [MOST_NESTED + 1, 900, 20_000])
@pytest.mark.parametrize("shape", ["array", "object", "prompt", "exit field", "transfer"])
def test_deeply_nested_bodies_are_refused(client: TestClient, shape: str, depth: int) -> None:
    for path in sorted(routes(client.app, "POST")):
        headers = {"content-type": "application/json"}
        answer = client.post(path, content=deep(shape, depth), headers=headers)
        assert answer.status_code == 400, (path, answer.text)
        assert "nests more than 100" in answer.json()["error"]["message"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='[]{}"\\,é\n'),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('"[}\\'), inner, max_size=3)
    ),
)


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


@given(VALUES)
def test_nesting(value: Any) -> None:
    flat = [[]] * MOST_NESTED  # so many brackets that they have to be looked at
    assert nesting(json.dumps([flat, value], ensure_ascii=False).encode()) == max(
        3, 1 + depth_of(value)
    )


@pytest.mark.parametrize("name", ["exit_threshold", "exit_layer", "exit_mode", "exit_trace"])
@pytest.mark.parametrize("value", [None, {}, {"a": 1}, [[1]], ["x" * 10_000] * 100, "x" * 50_000])
def test_bad_exit_fields_are_one_short_line(client: TestClient, name: str, value: Any) -> None:
    body = {"model": "m", "prompt": "x", "vllm_xargs": {name: value}}
    assert name in message_of(client.post("/v1/completions", json=body))
    body |= {"messages": [{"role": "user", "content": "x"}], "input": "x", "stream": True}
    for route in ("chat/completions", "responses", "messages"):
        assert name in message_of(client.post(f"/v1/{route}", json=body))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"vllm_xargs": 3}, "vllm_xargs"),
        ({"vllm_xargs": {"exit_" + "y" * 50_000: 1}}, "unknown field"),
        ({"vllm_xargs": {"other": {"a": ["b"]}}}, "vllm_xargs.other"),
        ({"exit_threshold": ["x" * 10_000]}, "exit_threshold"),
        ({"temperature": "x" * 10_000}, "temperature"),
        ({"temperature": [1] * 10_000}, "temperature"),
        ({"logprobs": ["x" * 1000] * 100}, "logprobs"),
        ({"stop": [["a"]] * 10_000}, "stop"),
        ({"logit_bias": {"k" * 20_000: "v"}}, "logit_bias"),
        ({"seed": 1e300}, "seed"),
        ({"stream_interval": 2**70}, "64 bits"),
        ({"n": None}, "n"),
        ({"structured_outputs": [[["a"]]]}, "wrong type"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"stream_options": {"include_usage": "perhaps"}, "stream": True}, "stream_options"),
    ],
)
def test_other_bad_fields_are_one_short_line_too(
    client: TestClient, change: dict[str, Any], field: str
) -> None:
    body = {"model": "m", "prompt": "x"} | change
    message = message_of(client.post("/v1/completions", json=body))
    assert field in message and "validation error" not in message


@pytest.mark.parametrize("body", [[], 3, {}, {"new_data_parallel_size": 2}])
def test_a_server_keeps_its_engines(client: TestClient, body: Any) -> None:
    assert "keeps the engines" in message_of(client.post("/scale_elastic_ep", json=body))


def message_of(answer: Any) -> str:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    for text in (error["message"], error["param"] or ""):
        assert "\n" not in text and len(text) <= LONGEST_LINE
    message: str = error["message"]
    return message
