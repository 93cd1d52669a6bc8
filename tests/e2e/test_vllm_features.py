"""What a vLLM user expects of sampling and serving, with exits on: each over HTTP."""

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from ..soak.holdings import settled

NAME = "exit-py"
PROMPT = "def read_lines(path):\n    with open(path"
EOS = 0
FULL_DEPTH = 24
LENGTH = 32
SAMPLED = {"temperature": 1.0, "seed": 7}
OPTIONS = [
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.4},
    {"logit_bias": "what is said"},
    {"bad_words": "what is said"},
    SAMPLED | {"top_p": 0.6},
    SAMPLED | {"top_k": 5, "min_p": 0.05},
]


def tokens(answer: dict[str, Any], index: int = 0) -> list[int]:
    return answer["choices"][index]["token_ids"]


def layers(answer: dict[str, Any], index: int = 0) -> list[int]:
    return answer["choices"][index]["exit_layers"]


def against(options: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Forbids a token or a word that the answer without options has, whatever the weights say."""
    if "logit_bias" in options:
        return {"logit_bias": {str(tokens(answer)[2]): -100}}
    if "bad_words" in options:
        return {"bad_words": re.findall("[a-z]{3,}", answer["choices"][0]["text"])[:2]}
    return options


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options))
def test_sampling_options(complete, plain_complete, options: dict[str, Any]) -> None:
    """Each changes the output, the same way every time, and at full depth as in plain vLLM."""
    options = against(options, complete(PROMPT, LENGTH, exit_threshold=0.2))
    first, second = (
        complete(PROMPT, LENGTH, exit_threshold=0.2, options=options) for _ in range(2)
    )
    assert (tokens(first), layers(first)) == (tokens(second), layers(second))
    assert min(layers(first)) < FULL_DEPTH
    weaker = SAMPLED if options.get("seed") == SAMPLED["seed"] else {}
    assert tokens(first) != tokens(complete(PROMPT, LENGTH, exit_threshold=0.2, options=weaker)), (
        "the option changed nothing"
    )
    full = complete(PROMPT, LENGTH, exit_threshold=1, options=options)
    assert tokens(full) == tokens(plain_complete(PROMPT, LENGTH, options=options))
    assert set(layers(full)) == {FULL_DEPTH}


def test_a_seed_fixes_tokens_and_depths_whatever_shares_the_batch(complete) -> None:
    def draw(seed: int) -> Any:
        options = {"temperature": 1.0, "seed": seed}
        return complete(PROMPT, LENGTH, exit_threshold=0.4, options=options)

    alone = [draw(seed) for seed in range(4)]
    with ThreadPoolExecutor(12) as pool:
        others = [pool.submit(draw, seed) for seed in range(100, 104)]
        others += [pool.submit(complete, "import os\n", 40, exit_layer=6) for _ in range(2)]
        others += [pool.submit(complete, "x", 40, exit_threshold=1) for _ in range(2)]
        together = [job.result() for job in [pool.submit(draw, seed) for seed in range(4)]]
        for job in others:
            job.result()
    for one, other in zip(alone, together, strict=True):
        assert (tokens(one), layers(one)) == (tokens(other), layers(other))
    assert len({tuple(tokens(answer)) for answer in alone}) == 4


@pytest.mark.parametrize("include", [True, False])
def test_stop_strings(complete, include: bool) -> None:
    free = complete(PROMPT, exit_threshold=0.4)
    text = free["choices"][0]["text"]
    word = text.split()[2]
    options = {"stop": ["never this", word], "include_stop_str_in_output": include}
    cut = complete(PROMPT, exit_threshold=0.4, options=options)
    (choice,) = cut["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", word)
    assert choice["text"] == text[: text.index(word) + include * len(word)]
    assert layers(cut) == layers(free)[: len(tokens(cut))]


def test_end_of_sequence_min_tokens_and_ignore_eos(complete) -> None:
    always_end = {"logit_bias": {str(EOS): 100}}

    def length(**options: Any) -> tuple[int, str]:
        answer = complete(PROMPT, 9, exit_threshold=0.4, options=always_end | options)
        assert len(layers(answer)) == len(tokens(answer)) == answer["usage"]["completion_tokens"]
        return len(tokens(answer)), answer["choices"][0]["finish_reason"]

    assert length() == (1, "stop")
    assert length(min_tokens=5) == (6, "stop")
    assert length(ignore_eos=True) == (9, "length")


def test_beam_search_runs_at_full_depth_and_says_so(server, plain_complete) -> None:
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 6, "n": 2, "use_beam_search": True}
    url = f"{server.url}/v1/completions"
    for fields in ({"exit_threshold": 0.4}, {"exit_layer": 6}, {"exit_trace": True}):
        refused = httpx.post(url, json=body | {"vllm_xargs": fields}, timeout=60)
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert message.startswith(next(iter(fields))) and "beam search" in message
    served = httpx.post(url, json=body | {"vllm_xargs": {"exit_threshold": 1}}, timeout=60).json()
    plain = plain_complete(PROMPT, 6, options={"n": 2, "use_beam_search": True})
    assert [c["text"] for c in served["choices"]] == [c["text"] for c in plain["choices"]]


def generated(server: Any) -> int:
    return httpx.get(f"{server.url}/exitserve/stats").json()["since_start"]["tokens"]


async def hang_up(url: str, body: dict[str, Any], once: Callable[[], bool]) -> None:
    """Sends a request and closes its connection as soon as `once` is true."""
    async with httpx.AsyncClient(timeout=60) as client:
        request = asyncio.create_task(client.post(url, json=body))
        while not once():
            assert not request.done(), "it was answered before it could be given up"
            await asyncio.sleep(0.02)
        request.cancel()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a_client_that_hangs_up_frees_its_row(server, complete, route: str, stream: bool) -> None:
    prompt = {"prompt": PROMPT, "messages": [{"role": "user", "content": PROMPT}]}
    key = "messages" if route.startswith("chat") else "prompt"
    body = {
        "model": NAME,
        "max_tokens": 450,
        "ignore_eos": True,
        "stream": stream,
        "logprobs": True if key == "messages" else 1,
        "vllm_xargs": {"exit_threshold": 0.4, "exit_trace": True},
        key: prompt[key],
    }
    before = generated(server)
    url = f"{server.url}/v1/{route}"
    if stream:
        with httpx.stream("POST", url, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            assert sum(next(lines).startswith("data: ") for _ in range(6)) == 3
    else:
        asyncio.run(hang_up(url, body, once=lambda: generated(server) > before))
    assert settled(server.url, None, seconds=30).is_idle
    assert 0 < generated(server) - before < 450, "it was generated to the end"
    assert len(layers(complete(PROMPT, 8, exit_threshold=0.4))) == 8
