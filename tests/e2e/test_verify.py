"""A server of mode "verify": the answers of plain vLLM, drafted by exits."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from exitserve.policy import ExitPolicy
from exitserve.reference import load_reference

from ..forks import LocalServer
from ..soak.answers import fault, replies
from ..soak.bodies import Bodies
from ..soak.holdings import TOKENS, metrics

NAME = "exit-py"
PROMPTS = (
    "def add(a, b):\n    return",
    "import os\nimport sys\n\n\ndef main(argv=None):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n",
    "for index, item in enumerate(items):\n    if item is None:\n        ",
)
VERIFY = ("--mode", "verify", "--exit-threshold", "0.3", "--num-drafts", "4")


Complete = Callable[..., dict[str, Any]]


@pytest.fixture(
    scope="module",
    params=[1, pytest.param(2, marks=pytest.mark.nightly)],
    ids=["one rank", "two ranks"],
)
def verifying(request: Any, bundled: Path, serve: Any) -> Iterator[LocalServer]:
    """One that drafts, on one rank, and on two."""
    with serve(bundled, *VERIFY, ranks=request.param) as running:
        yield running


@pytest.fixture(scope="module")
def ask(verifying: LocalServer) -> Iterator[Callable[..., Any]]:
    with OpenAI(base_url=f"{verifying.url}/v1", api_key="none", max_retries=0) as client:

        def ask(prompt: str, *, options: Any = None, **extra: Any) -> Any:
            body = {"temperature": 0, "return_token_ids": True, **extra}
            return client.completions.create(
                model=NAME, prompt=prompt, max_tokens=32, extra_body=body, **(options or {})
            )

        yield ask


def test_answers_are_those_of_plain_vllm(ask: Any, plain_complete: Complete) -> None:
    expected = [plain_complete(prompt, 32)["choices"][0]["token_ids"] for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(ask, PROMPTS))
    alone = [ask(prompt) for prompt in PROMPTS]
    for answers in (together, alone):
        assert [answer.choices[0].token_ids for answer in answers] == expected


def test_log_probabilities_are_those_of_full_depth(ask: Any) -> None:
    for prompt in PROMPTS:
        drafted = ask(prompt, logprobs=2)
        full = ask(prompt, logprobs=2, vllm_xargs={"exit_mode": "off"})
        assert not hasattr(drafted, "logprobs_from")
        mine, theirs = (answer.choices[0].logprobs for answer in (drafted, full))
        assert mine.tokens == theirs.tokens
        # Several positions in one pass, or one: float32 sums in another order.
        assert mine.token_logprobs == pytest.approx(theirs.token_logprobs, abs=1e-4)
        assert [set(one) for one in mine.top_logprobs] == [set(one) for one in theirs.top_logprobs]


def test_clients_that_hang_up_leave_nothing_behind(verifying: LocalServer, ask: Any) -> None:
    expected = ask(PROMPTS[3]).choices[0].token_ids
    for _ in range(3):
        stream = ask(PROMPTS[0], options={"stream": True}, ignore_eos=True)
        next(iter(stream))
        stream.close()
    assert ask(PROMPTS[3]).choices[0].token_ids == expected


def test_stops_cut_drafts_off(ask: Any) -> None:
    full = ask(PROMPTS[1], stop=["\n\n"], vllm_xargs={"exit_mode": "off"})
    drafted = ask(PROMPTS[1], stop=["\n\n"], vllm_xargs={"exit_trace": True})
    assert drafted.choices[0].text == full.choices[0].text
    assert drafted.choices[0].finish_reason == full.choices[0].finish_reason
    assert len(drafted.choices[0].exit_layers) == len(drafted.choices[0].token_ids)


@pytest.mark.parametrize("exit_threshold", [0.2, 0.5])
def test_answers_of_mode_defer_are_the_oracles(
    verifying: LocalServer, ask: Any, bundled: Path, exit_threshold: float
) -> None:
    """Their tokens may be final at the draft layer, the first exit; each is counted once."""
    oracle = load_reference(str(bundled), exit_layers=(6,))
    policy = ExitPolicy.confidence(exit_threshold, mode="defer")
    before = metrics(verifying.url)[TOKENS]
    fields = {"exit_mode": "defer", "exit_threshold": exit_threshold, "exit_trace": True}
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = pool.map(partial(ask, vllm_xargs=fields, ignore_eos=True), PROMPTS)
        answers = [answer.choices[0] for answer in found]
    for answer in answers:
        expected = oracle.decode(answer.prompt_token_ids, 32, policy, ignore_eos=True)
        assert answer.token_ids == expected.token_ids
        assert answer.exit_layers == expected.exit_layers
    told = sum(len(answer.token_ids) for answer in answers)
    assert metrics(verifying.url)[TOKENS] - before == told


def test_any_two_fields_together(verifying: LocalServer) -> None:
    openapi = httpx.get(f"{verifying.url}/openapi.json", timeout=60).json()
    bodies = Bodies(openapi, NAME, variety=4, modes=("default", "off", "defer", "verify"))
    found = list(replies(verifying.url, islice(bodies.pairs(), 60)))
    assert [(body.content, fault(*rest)) for body, *rest in found if fault(*rest)] == []
    assert sum(status == 200 for _, status, _ in found) > 0.4 * len(found)


def test_counts_are_vllms_own(verifying: LocalServer, ask: Any) -> None:
    """Of a request that runs to its end; vLLM does not count drafts of one that was aborted."""

    def counted() -> list[float]:
        stats = httpx.get(f"{verifying.url}/exitserve/stats").json()
        assert stats["default"]["mode"] == "verify"
        ours, found = stats["since_start"], metrics(verifying.url)
        theirs = (
            found[f"vllm:spec_decode_num_{name}"]
            for name in ("draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
        )
        return [ours["drafted_tokens"], ours["accepted_tokens"], *theirs]

    before = counted()
    ask(PROMPTS[0])
    drafted, accepted, *theirs = (
        int(after - first) for after, first in zip(counted(), before, strict=True)
    )
    assert 0 < accepted <= drafted
    assert theirs == [drafted, accepted, accepted]


def test_drafts_by_source(verifying: LocalServer, ask: Any) -> None:
    """Of text that repeats; the answer is the same whatever drafts it."""
    before = httpx.get(f"{verifying.url}/exitserve/stats").json()["since_start"]
    prompt, answers, accepted = "numbers = [1, 2, 3]\n" * 4, [], []
    for source in ("text", "layers", "both", "none"):
        found = ask(prompt, vllm_xargs={"exit_drafts": source, "exit_trace": True})
        answers.append(found.choices[0].token_ids)
        accepted.append(found.exit_metrics["accepted_drafts"])
    assert answers == answers[:1] * 4
    text, layers, both, none = accepted
    assert (text.keys(), layers.keys(), none) == ({"text"}, {"layers"}, {})
    assert both["text"] > 0
    after = httpx.get(f"{verifying.url}/exitserve/stats").json()["since_start"]
    # A pass may give more tokens than the answer has room for.
    assert after["accepted_from_text"] - before["accepted_from_text"] >= text["text"] + both["text"]
