"""Bad requests answer 400 with one clear line, and the server goes on serving."""

import json

import httpx
import pytest

NAME = "exit-py"
CONTEXT = 512
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.fixture
def post(server):
    def post(route: str = "completions", /, *, text: str | None = None, **body: object):
        body = {"model": NAME, "max_tokens": 2} | body
        if text is not None:
            headers = {"content-type": "application/json"}
            return httpx.post(f"{server.url}/v1/{route}", content=text, headers=headers)
        return httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60)

    return post


@pytest.fixture(autouse=True)
def still_serving(post):
    yield
    answer = post(prompt="x", vllm_xargs={"exit_threshold": 0.5})
    assert answer.status_code == 200, answer.text


def _says(answer: httpx.Response, *words: str) -> None:
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("value", ["0.5", -1, True, [0.5]])
def test_thresholds(post, value: object) -> None:
    _says(post(prompt="x", vllm_xargs={"exit_threshold": value}), "exit_threshold", repr(value))


@pytest.mark.parametrize("literal", ["NaN", "1e999"])
def test_thresholds_that_are_no_numbers(post, literal: str) -> None:
    body = f'{{"model": "{NAME}", "prompt": "x", "vllm_xargs": {{"exit_threshold": {literal}}}}}'
    _says(post(text=body), "exit_threshold must be a finite number above 0")


@pytest.mark.parametrize("value", ["yes", ["forged"], 2])
def test_no_route_takes_a_clients_keys_of_traces(server, value: object) -> None:
    body = {"model": NAME, "max_tokens": 2, "vllm_xargs": {"exit_trace": value}}
    for route, own in (
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": MESSAGES}),
        ("/invocations", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x"}),
    ):
        answer = httpx.post(f"{server.url}{route}", json=body | own, timeout=60)
        assert answer.status_code == 400, (route, answer.text)
        assert "exit_trace must be true or false" in answer.text


def test_json_that_is_nested_deeply_inside_a_text(post) -> None:
    call = {"name": "f", "arguments": "[" * 5000 + "]" * 5000}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ]
    _says(post("chat/completions", messages=messages), "nested too deeply")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "field", [{"stream_interval": 2**70}, {"repetition_detection": {"a": -(2**64)}}]
)
def test_numbers_that_do_not_reach_the_engine(post, stream: bool, field: dict) -> None:
    _says(post(prompt="x", stream=stream, **field), "too large", "64 bits")


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
@pytest.mark.parametrize("bans", [{"allowed_token_ids": [7]}, {"bad_words": ["y", "ye", "yes"]}])
def test_a_grammar_of_which_other_fields_leave_nothing(post, route: str, bans: dict) -> None:
    asked = {"prompt": "x"} if route == "completions" else {"messages": MESSAGES}
    asked |= {"structured_outputs": {"choice": ["yes"]}}
    _says(post(route, **asked, **bans), "grammar", *bans)
    streamed = post(route, stream=True, **asked, **bans).text
    (event,) = [one for one in streamed.splitlines() if "error" in one]
    error = json.loads(event.removeprefix("data: "))["error"]
    assert error["code"] == 400 and "grammar" in error["message"]
    assert streamed.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize("penalty", ["-3.8e16", "1e17", "-200", "NaN"])
def test_beams_whose_scores_would_be_no_numbers(post, penalty: str) -> None:
    body = '"max_tokens": 2, "use_beam_search": true, "n": 2, "length_penalty": ' + penalty
    _says(post(text=f'{{"model": "{NAME}", "prompt": "x", {body}}}'), "length_penalty")


def test_a_prompt_longer_than_the_context(post) -> None:
    _says(post(prompt="x = 1\n" * CONTEXT), str(CONTEXT))


@pytest.mark.parametrize("text", ["{", "", "not json", '{"model": }'])
def test_malformed_json(post, text: str) -> None:
    _says(post(text=text), "not valid JSON")
