"""Servers short of memory, on one rank or split over two, say what a roomy one says.

Requests are preempted, prompts come in chunks and prefixes from the cache; `complete` is the
server of `conftest.py`, where none of this happens.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from ..forks import LocalServer
from ..soak.holdings import PREEMPTIONS, metrics
from ..soak.soak import soak

NAME = "exit-py"
CODE = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n"
LENGTH = 80
BLOCK = 32
CHUNK = 64
CROWDED = {
    "--block-size": BLOCK,
    "--num-gpu-blocks-override": 22,  # for four rows of the eight
    "--max-num-seqs": 8,
    "--max-num-batched-tokens": CHUNK,
    "--max-model-len": 384,
}
FIELDS: list[dict[str, Any]] = [
    {"exit_threshold": 0.2},
    {"exit_threshold": 0.5},
    {"exit_layer": 6},
    {"exit_threshold": 1},
]

Complete = Callable[..., dict[str, Any]]


@pytest.fixture(
    scope="module",
    params=[1, pytest.param(2, marks=pytest.mark.nightly)],
    ids=["one rank", "two ranks"],
)
def crowded(request: Any, bundled: Path, serve: Any) -> Iterator[LocalServer]:
    """Eight rows that share a cache for four, on one rank or tensor-parallel on two."""
    options = (word for pair in CROWDED.items() for word in pair)
    with serve(bundled, *options, ranks=request.param) as running:
        yield running


def ask(server: LocalServer, prompt: str, fields: dict[str, Any]) -> dict[str, Any]:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    body = {
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "vllm_xargs": fields | {"exit_trace": True},
    }
    answer = client.completions.create(
        model=NAME, prompt=prompt, max_tokens=LENGTH, extra_body=body, timeout=300
    )
    return answer.model_dump()


def said(answer: dict[str, Any]) -> tuple[list[int], list[int]]:
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == LENGTH
    return choice["token_ids"], choice["exit_layers"]


def expected(complete: Complete, prompt: str, fields: dict[str, Any]) -> tuple[Any, Any]:
    return said(complete(prompt, LENGTH, options={"ignore_eos": True}, **fields))


def test_nothing_is_lost_when_requests_are_preempted(crowded, complete) -> None:
    prompts = [f"# {number}\n" + CODE * (1 + number % 3) for number in range(10)]
    jobs = list(zip(prompts, [*FIELDS, {"exit_layer": 12}] * 2, strict=True))
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = list(pool.map(lambda job: said(ask(crowded, *job)), jobs))
    assert answers == [expected(complete, *job) for job in jobs]
    assert metrics(crowded.url)[PREEMPTIONS] > 0, "the test shows nothing"
    assert {6, 24} <= {depth for _, depths in answers for depth in depths}


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: "-".join(map(str, *fields.items())))
def test_prompts_in_chunks_and_from_the_prefix_cache(crowded, complete, fields) -> None:
    """What a request wrote is read by its like only, and changes nothing."""
    prompt = CODE * 6
    name = "vllm:prefix_cache_hits"
    hits = metrics(crowded.url)[name]
    first = ask(crowded, prompt, fields)
    assert first["usage"]["prompt_tokens"] > CHUNK
    after_first = metrics(crowded.url)[name]
    assert after_first == hits, "another policy's cache was read"
    assert said(ask(crowded, prompt, fields)) == said(first)
    assert metrics(crowded.url)[name] >= after_first + BLOCK
    assert said(first) == expected(complete, prompt, fields)


@pytest.mark.parametrize("crowded", [1], indirect=True, ids=["one rank"])
@pytest.mark.nightly
def test_a_soak(crowded: LocalServer) -> None:
    """Some of what `python -m tests.soak` does for ten minutes."""
    report = soak(crowded.url, seconds=40, variety=4, pid=crowded.pid)
    assert report["faults"] == []
    assert report["compared"] > 20 and report["preemptions"] > 0, "the test shows little"
