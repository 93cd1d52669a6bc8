"""Live quality (--shadow-rate): what full depth thinks of answers, on /metrics alone.

`judging` judges every request; `server`, which judges none, says what answers should be.
"""

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from exitserve.checkpoint.block import read_multi_exit
from exitserve.checkpoint.calibration import OperatingPoint
from exitserve.policy import ExitPolicy
from exitserve.reference import load_reference

from ..forks import LocalServer

NAME = "exit-py"
PROMPT = "def read_lines(path):\n    with open(path"
MESSAGES = [{"role": "user", "content": PROMPT}]
LAYERS = 24
THRESHOLD = 0.4  # of all exits, by the calibration
Counts = Counter[tuple[str, int]]
"""Tokens by whose thresholds they had, and by depth."""


@pytest.fixture(scope="module")
def point(calibrated: Path) -> OperatingPoint:
    """What the checkpoint promises."""
    block = read_multi_exit(calibrated)
    assert block is not None and block.calibration is not None
    assert set(block.calibration.chosen.thresholds.values()) == {THRESHOLD}
    return block.calibration.chosen


@pytest.fixture(scope="module", autouse=True)
def nothing_failed(judging: LocalServer) -> Iterator[None]:
    yield
    text = judging.log.read_text()
    assert "could not be compared" not in text
    assert "server/shadow_evaluation.py" not in text, "a traceback"


def read(server: LocalServer, name: str) -> dict[tuple[str, ...], float]:
    """A metric by its labels, without the model's name; labels are ordered by their names."""
    page = httpx.get(f"{server.url}/metrics", follow_redirects=True).text
    found = {}
    for labels, value in re.findall(rf"^{name}\{{(.*)\}} (\S+)$", page, flags=re.MULTILINE):
        pairs = re.findall(r'(\w+)="([^"]*)"', labels)
        found[tuple(text for key, text in pairs if key != "model_name")] = float(value)
    return found


def by_thresholds(server: LocalServer, name: str) -> Counts:
    counts = read(server, f"exitserve_shadow_{name}_total")
    return Counter({(whose, int(depth)): int(n) for (depth, whose), n in counts.items()})


class Watch:
    """What is judged from now on."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self._before = {name: by_thresholds(server, name) for name in ("tokens", "agreed")}

    def _since(self, name: str) -> Counts:
        return by_thresholds(self._server, name) - self._before[name]

    def tokens(self, expected: int) -> Counts:
        """Tokens judged, once there are as many as expected; a little later there are no more."""
        deadline = time.monotonic() + 30
        while self._since("tokens").total() < expected and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.3)
        return self._since("tokens")

    def agreed(self) -> Counts:
        return self._since("agreed")


def completion(client: OpenAI, prompt: Any = PROMPT, **options: Any) -> dict[str, Any]:
    xargs = options.pop("fields", {}) | {"exit_trace": True}
    body = {"temperature": 0, "max_tokens": 24, "return_token_ids": True} | options
    answer = client.completions.create(
        model=NAME, prompt=prompt, extra_body=body | {"vllm_xargs": xargs}
    )
    return answer.model_dump()


def depths(answer: dict[str, Any]) -> list[int]:
    return [depth for choice in answer["choices"] for depth in choice["exit_layers"]]


def counted(found: list[int], whose: str = "calibrated") -> Counts:
    return Counter((whose, depth) for depth in found)


@pytest.mark.parametrize("fields", [{}, {"exit_threshold": 0.5}], ids=str)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_agreement_is_the_oracles(
    judging, early_client, calibrated, point, fields, sampled
) -> None:
    """Of likeliest tokens, for the same text: what was sampled makes no difference."""
    whose = "other" if fields else "calibrated"
    options = {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 48} if sampled else {}
    watch = Watch(judging)
    answer = completion(early_client, fields=fields, **options)
    expected, agreed = counted(depths(answer), whose), Counts()
    reference = load_reference(str(calibrated))
    told = ExitPolicy.calibrated(point, mode="confidence")
    if fields:
        told = ExitPolicy.confidence(0.5)
    for choice in answer["choices"]:
        start = len(choice["prompt_token_ids"])
        ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
        exits, full = (
            reference.trace(ids, start, policy).logits.argmax(dim=-1)[start - 1 : -1].tolist()
            for policy in (told, ExitPolicy.off())
        )
        if not sampled:
            assert exits == choice["token_ids"]
        for depth, one, other in zip(choice["exit_layers"], exits, full, strict=True):
            agreed[whose, depth] += one == other
    assert watch.tokens(expected.total()) == expected
    assert watch.agreed() == +agreed
    assert sum(n for (_, depth), n in agreed.items() if depth < LAYERS) > 0, "nothing exits"


def test_every_way_to_ask_is_judged(judging, early_client) -> None:
    client = early_client
    found: list[int] = []
    watch = Watch(judging)
    found += depths(completion(client, [PROMPT, "import os\n", "x"]))
    found += depths(completion(client, logprobs=0)) + depths(completion(client, logprobs=3))
    stop = completion(client)
    found += depths(stop)
    stopped = completion(client, stop=[stop["choices"][0]["text"][6:9]])
    assert len(depths(stopped)) < 24
    found += depths(stopped)
    chat: dict[str, Any] = {
        "model": NAME,
        "messages": MESSAGES,
        "max_tokens": 16,
        "n": 2,
        "temperature": 0.8,
        "extra_body": {"vllm_xargs": {"exit_trace": True}},
    }
    found += depths(client.chat.completions.create(**chat).model_dump())
    for chunk in client.chat.completions.create(stream=True, **chat):
        found += [d for one in chunk.model_dump()["choices"] for d in one.get("exit_layers", [])]
    expected = counted(found)
    assert watch.tokens(expected.total()) == expected
    # Untraced requests are judged, on routes that tell no depths as well.
    watch = Watch(judging)
    client.completions.create(model=NAME, prompt=PROMPT, max_tokens=8)
    answer = client.responses.create(model=NAME, input=PROMPT, max_output_tokens=8)
    length = 8 + answer.usage.output_tokens
    assert watch.tokens(length).total() == length


def test_what_no_threshold_lets_out_is_not_judged(judging, early_client) -> None:
    watch = Watch(judging)
    for fields in ({"exit_threshold": 1}, {"exit_layer": 12}, {"exit_mode": "off"}):
        completion(early_client, fields=fields)
    completion(early_client, max_tokens=1)
    early = {"exit_threshold": 0.3}
    completion(early_client, fields=early, structured_outputs={"choice": ["yes", "no"]})
    expected = counted(depths(completion(early_client, fields=early)), "other")
    assert watch.tokens(expected.total()) == expected


def pieces(parts: Any) -> dict[int, list[Any]]:
    """All that is told of each choice; a stream's texts and log-probabilities are put together."""
    told: dict[int, list[Any]] = {}
    for part in parts:
        for choice in part.model_dump()["choices"]:
            text, tokens, rest = told.setdefault(choice["index"], ["", [], {}])
            said = choice.get("delta") or choice.get("message") or choice
            logprobs = choice.pop("logprobs")
            tokens += [] if logprobs is None else logprobs.get("content") or logprobs["tokens"]
            told[choice["index"]][0] = text + (said.pop("text", said.pop("content", "")) or "")
            rest |= {key: value for key, value in choice.items() if value is not None}
    return told


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
@pytest.mark.parametrize("asked", [None, 0, 2])
def test_answers_are_those_of_a_server_that_judges_none(
    client, early_client, chat: bool, asked: int | None
) -> None:
    """Log-probabilities, which the judge needs, are told to clients that asked, as they asked."""
    logprobs: dict[str, Any] = {"logprobs": asked}
    prompt: dict[str, Any] = {"prompt": PROMPT}
    if chat:
        logprobs = {} if asked is None else {"logprobs": True, "top_logprobs": asked}
        prompt = {"messages": MESSAGES}
    body = {
        "max_tokens": 16,
        "temperature": 0.9,
        "seed": 3,
        "n": 2,
        "vllm_xargs": {"exit_threshold": THRESHOLD},
    }

    def ask(one: OpenAI, *, stream: bool) -> Any:
        create = one.chat.completions.create if chat else one.completions.create
        answer = create(model=NAME, stream=stream, extra_body=body, **prompt, **logprobs)
        return answer if stream else [answer]

    for stream in (False, True):
        ours = pieces(ask(early_client, stream=stream))
        assert ours == pieces(ask(client, stream=stream))
        assert all(bool(tokens) == (asked is not None) for _, tokens, _ in ours.values())


def test_a_client_that_hangs_up_leaves_an_answer_to_judge(judging, early_client) -> None:
    watch = Watch(judging)
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 450, "ignore_eos": True, "stream": True}
    url = f"{judging.url}/v1/completions"
    key = {"authorization": f"Bearer {early_client.api_key}"}
    with httpx.stream("POST", url, json=body, headers=key, timeout=60) as answer:
        lines = answer.iter_lines()
        assert sum(next(lines).startswith("data: ") for _ in range(6)) == 3
    assert 0 < watch.tokens(1).total() < 450


def test_the_promise_is_exported(judging, point, server) -> None:
    assert read(judging, "exitserve_calibrated_agreement") == {(): point.agreement}
    for name in ("exitserve_calibrated_agreement", "exitserve_shadow_tokens_total"):
        assert read(server, name) == {}, "nothing was promised, nor is judged"
