"""How a server ends: its engine dies, it is told to stop, or it is killed outright.

One command, started again after each end as a supervisor would, on the same port. The last test
starts the installed one; that of the others is a fork (`tests/forks.py`).
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ..forks import ForkedServer, LocalServer
from .engines import started_by

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")
# A worker of its own can die alone.
OPTIONS = ("--dtype", "float32", "--enforce-eager", "--served-model-name", "m")
OPTIONS += ("--distributed-executor-backend", "mp", "--shutdown-timeout", "300")
SOON = 30.0
"""Seconds; two or three, on machines that do nothing else."""
ENDLESS, SHORT = 4000, 300
"""Tokens of a request that something comes in between of, and of one that should end first."""


@pytest.fixture(scope="module")
def model(make_checkpoint: Any) -> Path:
    path: Path = make_checkpoint("llama", max_position_embeddings=2 * ENDLESS)
    return path


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """Not started."""
    one = ForkedServer(model, *OPTIONS, log=tmp_path_factory.mktemp("ends") / "server.log")
    yield one
    one.stop()


@pytest.fixture
def installed(model: Path, tmp_path: Path) -> Iterator[LocalServer]:
    """Not started; its processes are children of each other, as a user's are."""
    one = LocalServer(model, *OPTIONS, log=tmp_path / "server.log")
    yield one
    one.stop()


def _others(server: LocalServer) -> dict[int, str]:
    """The command lines of the processes that a server started."""
    found = {}
    for process in started_by(server):
        with suppress(psutil.Error):  # gone meanwhile
            found[process.pid] = " ".join(process.cmdline())
    return found


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _left(pids: dict[int, str]) -> list[str]:
    """Those that have not ended soon."""
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline and any(map(_alive, pids)):
        time.sleep(0.2)
    return [name for pid, name in pids.items() if _alive(pid)]


def _health(server: LocalServer) -> int | None:
    try:
        return httpx.get(f"{server.url}/health", timeout=5).status_code
    except httpx.HTTPError:
        return None


def _counts(server: LocalServer, tokens: int) -> bool:
    """Whether it soon tells of so many; a busy one shows its last counts at first."""
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        page = httpx.get(f"{server.url}/exitserve/stats", timeout=5).json()
        if page["since_start"]["tokens"] >= tokens:
            return True
        time.sleep(0.2)
    return False


def _body(max_tokens: int, *, stream: bool) -> dict[str, Any]:
    xargs = {"exit_threshold": 0.3, "exit_trace": True}
    body = {"model": "m", "prompt": "def", "max_tokens": max_tokens, "ignore_eos": True}
    body |= {"temperature": 0, "stream": stream, "return_token_ids": True}
    return body | {"vllm_xargs": xargs}


class Stream:
    """A streamed completion that another thread reads."""

    def __init__(self, server: LocalServer, max_tokens: int, pool: ThreadPoolExecutor) -> None:
        self.events: list[str] = []
        self._url, self._max_tokens = f"{server.url}/v1/completions", max_tokens
        self.ended: Future[None] = pool.submit(self._read)
        while len(self.events) < 2:
            assert not self.ended.done(), self.events
            time.sleep(0.01)

    def _read(self) -> None:
        body = _body(self._max_tokens, stream=True)
        with httpx.stream("POST", self._url, json=body, timeout=300) as answer:
            for line in filter(None, answer.iter_lines()):
                self.events.append(line.removeprefix("data: "))


@pytest.mark.parametrize("victim", ["VLLM::Worker", "VLLM::EngineCore"])
def test_a_server_ends_with_its_engine(server: LocalServer, victim: str) -> None:
    """Its clients get errors, its exit code says so, and the next one serves."""
    server.start()
    processes = _others(server)
    (process,) = (pid for pid, command in processes.items() if command.startswith(victim))
    url = f"{server.url}/v1/completions"
    with ThreadPoolExecutor() as pool:
        answer = httpx.post(url, json=_body(8, stream=False), timeout=60)
        assert len(answer.json()["choices"][0]["exit_layers"]) == 8
        streams = [Stream(server, ENDLESS, pool) for _ in range(2)]
        whole = pool.submit(httpx.post, url, json=_body(ENDLESS, stream=False), timeout=300)
        assert _counts(server, 8)
        os.kill(process, signal.SIGKILL)
        for stream in streams:
            stream.ended.result(SOON)
            assert "error" in json.loads(stream.events[-2]) and stream.events[-1] == "[DONE]"
        assert whole.result(SOON).status_code == 500
        assert _health(server) in (503, None)
        assert server.wait(SOON) == 1
    assert "the engine failed" in server.log.read_text()
    assert _left(processes) == []


def test_a_server_that_starts_ends_when_it_is_told_to(installed: LocalServer) -> None:
    with ThreadPoolExecutor() as pool:
        started = pool.submit(installed.start)
        time.sleep(1.0)  # so that there is a process; its imports alone take longer
        while not any("EngineCore" in one for one in _others(installed).values()):
            assert not started.done()
            time.sleep(0.02)
        os.kill(installed.pid, signal.SIGTERM)
        with pytest.raises(RuntimeError, match="did not start"):
            started.result(SOON)


def test_a_server_finishes_what_runs_and_its_engine_ends_with_it(installed: LocalServer) -> None:
    """As a supervisor stops it: asked first, and killed outright once its time is up."""
    installed.start()
    processes = _others(installed)
    assert any(command.startswith("VLLM::") for command in processes.values())
    with ThreadPoolExecutor() as pool, httpx.Client(base_url=installed.url) as early:
        endless, short = (Stream(installed, length, pool) for length in (ENDLESS, SHORT))
        assert early.get("/health").status_code == 200
        os.kill(installed.pid, signal.SIGTERM)
        # Else a router would send all requests here, where none is answered.
        while _health(installed) is not None:
            assert not short.ended.done(), "the test shows nothing"
        assert early.post("/v1/completions", json=_body(8, stream=False)).status_code == 503
        short.ended.result(300)
        *chunks, end = short.events
        choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
        assert end == "[DONE]" and choices[-1]["finish_reason"] == "length"
        # A chunk may hold more than one, if the server is busy.
        assert sum(len(choice["token_ids"] or ()) for choice in choices) == SHORT
        assert choices[-1]["exit_layers"] is None, "an engine that stops tells no depths"
        assert not endless.ended.done(), "the test shows nothing"
        os.kill(installed.pid, signal.SIGKILL)
        assert _left(processes) == []
        assert isinstance(endless.ended.exception(SOON), httpx.HTTPError)
