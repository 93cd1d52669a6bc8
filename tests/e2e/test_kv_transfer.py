"""Keys and values of full depth go between servers, by vLLM's example connector: a shared folder.

One server runs at full depth and one drafts (mode "verify"); each reads what the other wrote.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from exitserve.policy import ExitPolicy
from exitserve.reference import load_reference

from ..forks import LocalServer
from ..soak.holdings import metrics
from .conftest import NAME, Serve

pytestmark = pytest.mark.nightly

BLOCK = 32
LENGTH = 2 * BLOCK
TEXT = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n" * 8
DRAFTS = ("--mode", "verify", "--exit-threshold", 0.3)


@pytest.fixture(scope="module")
def servers(
    bundled: Path, serve: Serve, tmp_path_factory: Any
) -> Iterator[tuple[LocalServer, LocalServer]]:
    """One at full depth, and one that drafts."""
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path_factory.mktemp("kv"))},
    }
    options = ("--block-size", BLOCK, "--kv-transfer-config", json.dumps(transfer))
    with serve(bundled, *options) as full, serve(bundled, *options, *DRAFTS) as drafting:
        yield full, drafting


def ask(server: LocalServer, prompt: list[int], **fields: Any) -> httpx.Response:
    body = {"model": NAME, "prompt": prompt, "max_tokens": LENGTH, "ignore_eos": True}
    body |= {"temperature": 0, "return_token_ids": True, "vllm_xargs": fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)


def tokens(server: LocalServer, prompt: list[int]) -> list[int]:
    found: list[int] = ask(server, prompt).json()["choices"][0]["token_ids"]
    return found


def taken(server: LocalServer) -> float:
    """Tokens whose keys and values came from the connector."""
    return metrics(server.url)["vllm:external_prefix_cache_hits"]


def test_each_reads_what_the_other_wrote(
    bundled: Path, servers: tuple[LocalServer, LocalServer]
) -> None:
    full, drafting = servers
    text = AutoTokenizer.from_pretrained(bundled)(TEXT)["input_ids"]
    prompt, other = text[: 2 * BLOCK + 9], text[3 : 2 * BLOCK]
    oracle = load_reference(str(bundled))

    def alone(ids: list[int]) -> list[int]:
        return oracle.decode(ids, LENGTH, ExitPolicy.off(), ignore_eos=True).token_ids

    first = tokens(full, prompt)
    assert first == alone(prompt) and taken(full) == 0
    assert tokens(drafting, prompt) == first
    assert taken(drafting) == 2 * BLOCK
    assert metrics(drafting.url)["vllm:spec_decode_num_accepted_tokens"] > 0, "nothing is drafted"
    # The other way round: blocks of an answer that drafts began and full depth completed.
    follow_up = [*other, *tokens(drafting, other), *prompt[:5]]
    second = tokens(drafting, follow_up)
    assert second == alone(follow_up)
    assert tokens(full, follow_up) == second
    assert taken(full) > len(other)


@pytest.mark.parametrize(
    "fields", [{"exit_threshold": 0.5, "exit_mode": "defer"}, {"exit_layer": 6}]
)
def test_tokens_that_exit_would_write_something_else(
    servers: tuple[LocalServer, LocalServer], fields: dict[str, Any]
) -> None:
    for server in servers:
        answer = ask(server, [40, 41], **fields)
        assert answer.status_code == 400
        assert "needs a server without KV transfer" in answer.json()["error"]["message"]
