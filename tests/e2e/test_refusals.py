"""What cannot be served with exits is refused: at start-up in one line, or with a 400."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ..forks import PythonProcess

SECONDS = 120
"""Enough to start, if nothing refuses; who starts is seen by its processes."""

FLAGS = [
    ("--enable-lora", "LoRA", "without the adapter"),
    ("--speculative-config.method ngram", "speculative decoding", "--mode verify"),
    ("--port 99999", "cannot serve at :99999", "0-65535"),
    ("--enable-auto-tool-choice --tool-call-parser x", "tool call parser: x", "hermes"),
]
"""All of what is refused at start-up: tests/server/test_start_up_refusals.py."""


def serve(log: Path, *options: str) -> tuple[int, list[str], float, set[str]]:
    """Exit code, lines of output, seconds, and the names of the processes it started."""
    started = time.monotonic()
    process = PythonProcess("exitserve", ["serve", *options], log, os.environ)
    children: set[str] = set()
    while process.poll() is None and time.monotonic() < started + SECONDS:
        for other in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):  # gone meanwhile
                if other.pid != process.pid and os.getpgid(other.pid) == process.pid:
                    children.add(other.name())
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    return code, log.read_text().splitlines(), time.monotonic() - started, children


@pytest.fixture(scope="module")
def refused(bundled: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a line of flags leads to."""

    def refused(flags: str) -> tuple[int, list[str], float, set[str]]:
        log = tmp_path_factory.mktemp("refused") / "server.log"
        return serve(log, str(bundled), *flags.split())

    return refused


@pytest.mark.parametrize(("flags", "feature", "reason"), FLAGS, ids=lambda text: text)
def test_start_up(refused, flags: str, feature: str, reason: str) -> None:
    code, output, seconds, children = refused(flags)
    assert code == 2, output
    assert not any("Traceback" in line for line in output)
    (line,) = [line for line in output if line.startswith("exitserve: ")]
    assert feature in line and reason in line
    # vLLM's import may print a line of its own before.
    assert output[-1] == line and len(output) <= 3, output
    assert seconds < SECONDS
    assert not any("EngineCore" in name or "Worker" in name for name in children)


@pytest.mark.parametrize("route", ["v1/embeddings", "pooling", "v1/score", "classify"])
def test_routes_of_pooling_models(server, route: str) -> None:
    answer = httpx.post(f"{server.url}/{route}", json={"model": "exit-py", "input": "x"})
    assert answer.status_code == 400
    assert "only generates text" in answer.json()["error"]["message"]
