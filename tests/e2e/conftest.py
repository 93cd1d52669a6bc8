"""Real servers over HTTP, one a session: ours and plain vLLM, on the bundled model."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from exitserve.server.local_server import LocalServer, free_port, stop

NAME = "exit-py"
# A worker in the engine's own process spares the start of one more; servers of several ranks, and
# the demo's, have workers of their own.
ONE_PROCESS = ("--distributed-executor-backend", "uni")
OPTIONS = ("--dtype", "float32", "--enforce-eager", "--served-model-name", NAME, *ONE_PROCESS)


@pytest.fixture(scope="session")
def server(bundled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """Our server, full depth by default."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    with LocalServer(bundled, *OPTIONS, log=log) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: LocalServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def plain_client(bundled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """Plain vLLM on the same checkpoint."""
    port = free_port()
    log = tmp_path_factory.mktemp("plain") / "server.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(bundled)]
    command += ["--host", "127.0.0.1", "--port", str(port), *OPTIONS]
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, process_group=0
        )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 300
    while not _healthy(url):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.5)
    yield OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    stop(process)


def _healthy(url: str) -> bool:
    try:
        return bool(httpx.get(f"{url}/health", timeout=2).status_code == 200)
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="session")
def complete(client: OpenAI) -> Any:
    """`complete(prompt, exit_threshold=0.5, ...)`: a greedy completion with a trace, as a dict.

    `options` are any other fields of the request, OpenAI's or vLLM's.
    """

    def complete(prompt: Any, max_tokens: int = 24, *, options: Any = None, **fields: Any) -> Any:
        xargs = {**fields, "exit_trace": True}
        return _complete(client, prompt, max_tokens, (options or {}) | {"vllm_xargs": xargs})

    return complete


@pytest.fixture(scope="session")
def plain_complete(plain_client: OpenAI) -> Any:
    """`complete` of plain vLLM."""

    def complete(prompt: Any, max_tokens: int = 24, *, options: Any = None) -> Any:
        return _complete(plain_client, prompt, max_tokens, options or {})

    return complete


def _complete(client: OpenAI, prompt: Any, max_tokens: int, options: dict[str, Any]) -> Any:
    # Fields of vLLM's own are unknown to the official client, but may all stand in extra_body.
    answer = client.completions.create(
        model=NAME,
        prompt=prompt,
        max_tokens=max_tokens,
        extra_body={"temperature": 0, "return_token_ids": True, **options},
    )
    return answer.model_dump()


@pytest.fixture(scope="session")
def early_client(bundled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A server whose requests exit unless they say otherwise, and which may call tools."""
    log = tmp_path_factory.mktemp("early") / "server.log"
    options = ("--exit-threshold", "0.4", "--enable-auto-tool-choice", "--tool-call-parser")
    # A small model would go on with blanks for ever where the grammar lets it.
    grammar = (
        "--structured-outputs-config",
        '{"backend": "xgrammar", "disable_any_whitespace": true}',
    )
    with LocalServer(bundled, *OPTIONS, *options, "hermes", *grammar, log=log) as running:
        yield OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
