"""A server that drafts, over HTTP, as on a GPU but for its graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import BadRequestError, OpenAI

from exitserve.policy import ExitPolicy
from exitserve.reference import load_reference

from ...forks import LocalServer

pytestmark = pytest.mark.nightly

PROMPT = "def read_lines(path):\n    with open(path"
NAME = "drafting"


@pytest.fixture
def server(bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalServer]:
    """In one process, as with one GPU; drafts come from the first exit layer, 6 of 24."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    options = (
        "--mode defer --exit-threshold 0.4 --dtype float32 --enforce-eager --max-model-len 256"
    )
    options += f" --max-num-seqs 4 --distributed-executor-backend uni --served-model-name {NAME}"
    running = LocalServer(bundled, *options.split(), log=tmp_path / "server.log")
    running.start()
    yield running
    running.stop()


def test_a_server_that_drafts(server: LocalServer, bundled: Path) -> None:
    """Depths, log-probabilities, refusals and counts of its modes."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def ask(**fields: object) -> dict[str, object]:
        xargs = {"exit_trace": True, **fields}
        answer = client.completions.create(
            model=NAME,
            prompt=PROMPT,
            max_tokens=16,
            temperature=0,
            logprobs=1,
            extra_body={"vllm_xargs": xargs, "return_token_ids": True, "ignore_eos": True},
        )
        found: dict[str, object] = answer.model_dump()
        return found

    reference = load_reference(str(bundled), exit_layers=(6,), exit_rows="all")
    ids = ask()["choices"][0]["prompt_token_ids"]  # type: ignore[index]
    for fields, policy in (
        ({}, ExitPolicy.confidence(0.4, mode="defer")),
        ({"exit_mode": "verify"}, ExitPolicy.off()),
        ({"exit_mode": "off"}, ExitPolicy.off()),
    ):
        answer = ask(**fields)
        (choice,) = answer["choices"]  # type: ignore[misc]
        expected = reference.decode(ids, 16, policy, ignore_eos=True)
        assert choice["token_ids"] == expected.token_ids
        assert choice["exit_layers"] == expected.exit_layers
        assert len(choice["logprobs"]["token_logprobs"]) == 16
        assert ("logprobs_from" in answer) == (policy.mode == "defer")
    for fields, words in (
        ({"exit_mode": "confidence"}, "exitserve serve --mode confidence"),
        ({"exit_layer": 6}, "exitserve serve --exit-layer N"),
    ):
        with pytest.raises(BadRequestError, match=words):
            ask(**fields)
    stats = httpx.get(f"{server.url}/exitserve/stats").json()["since_start"]
    assert stats["tokens"] == 4 * 16
    assert 0 < stats["checks_passed"] < stats["checks"]
    metrics = httpx.get(f"{server.url}/metrics").text
    assert f'vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="{NAME}"}}' in metrics
