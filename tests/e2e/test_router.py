"""Two servers behind nginx, as `deploy/nginx` configures it: fields, streams, sessions, a death."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from ..forks import LocalServer, free_port
from ..soak.holdings import metrics
from .conftest import NAME, Serve

pytestmark = pytest.mark.nightly

FOLDER = Path(__file__).parents[2] / "deploy" / "nginx"
MAIN = """
daemon off;
pid nginx.pid;
worker_processes 1;
error_log error.log;
events {}
http { include exitserve.conf; }
"""
FIELDS = {"exit_threshold": 0.4, "exit_trace": True}
PROMPT = "def read_lines(path):\n    with open(path"
LONG = 400
"""Tokens; they take seconds."""
SESSIONS = tuple(f"session-{number}" for number in range(8))


@dataclass(frozen=True)
class Router:
    """A running nginx."""

    url: str
    log: Path

    def replica_of(self, headers: dict[str, str]) -> str:
        """The port of the replica that answers a short request, while there is no other."""
        before = len(self.replicas())
        answer = httpx.post(f"{self.url}/v1/completions", json=body(1), headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        # nginx writes the line after the answer.
        wait_until(lambda: len(self.replicas()) > before)
        return self.replicas()[-1]

    def replicas(self) -> list[str]:
        """The port of the last replica that each request was sent to, as they ended."""
        return re.findall(r", by .*:(\d+)$", self.log.read_text(), flags=re.MULTILINE)


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def body(tokens: int, **fields: Any) -> dict[str, Any]:
    """A greedy request with exits and their trace."""
    return {
        "model": NAME,
        "prompt": PROMPT,
        "max_tokens": tokens,
        "temperature": 0,
        "vllm_xargs": FIELDS,
        **fields,
    }


def events(url: str, tokens: int, headers: dict[str, str] | None = None) -> list[tuple[float, str]]:
    """The events of a stream with the seconds at which they came."""
    request = {"json": body(tokens, stream=True, ignore_eos=True), "headers": headers or {}}
    found, begun = [], time.monotonic()
    with httpx.stream("POST", f"{url}/v1/completions", timeout=120, **request) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                found.append((time.monotonic() - begun, line.removeprefix("data: ")))
    return found


def told(streamed: list[tuple[float, str]]) -> dict[str, Any]:
    """The text and the exit fields of a stream, however many tokens an event has."""
    assert streamed[-1][1] == "[DONE]"
    found = [json.loads(text) for _, text in streamed[:-1]]
    layers = [choice.get("exit_layers") for one in found for choice in one["choices"]]
    return {
        "text": "".join(choice["text"] for one in found for choice in one["choices"]),
        "exit_layers": [one for one in layers if one],
        "exit_metrics": [one["exit_metrics"] for one in found if "exit_metrics" in one],
    }


@pytest.fixture(scope="module")
def nginx() -> str:
    """The program; Debian's is outside of users' paths."""
    found = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip("no nginx: install Debian's nginx-light, for example")
    return found


@pytest.fixture(scope="module")
def second(nginx: str, bundled: Path, serve: Serve) -> Iterator[LocalServer]:
    """Another replica, which may be killed."""
    with serve(bundled) as running:
        yield running


@pytest.fixture(scope="module")
def router(
    nginx: str, server: LocalServer, second: LocalServer, tmp_path_factory: Any
) -> Iterator[Router]:
    """nginx with our configuration, but for addresses and a shorter memory of failures."""
    folder: Path = tmp_path_factory.mktemp("nginx")
    port = free_port()
    text = (FOLDER / "exitserve.conf").read_text()
    for ours, here in (
        ("listen 8080;", f"listen 127.0.0.1:{port};"),
        ("/var/log/nginx/exitserve.log", "access.log"),
    ):
        assert text.count(ours) == 1
        text = text.replace(ours, here)
    (folder / "exitserve.conf").write_text(text)
    (line, *_) = re.findall(r"^server .*$", (FOLDER / "exitserve-replicas").read_text(), re.M)
    assert "fail_timeout=10s" in line
    line = line.replace("fail_timeout=10s", "fail_timeout=1s")
    lines = [re.sub(r"[\d.]+:8000", f"127.0.0.1:{one.port}", line) for one in (server, second)]
    (folder / "exitserve-replicas").write_text("\n".join(lines))
    (folder / "nginx.conf").write_text(MAIN)
    command = [nginx, "-e", "error.log", "-p", str(folder), "-c", str(folder / "nginx.conf")]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE)
    running = Router(f"http://127.0.0.1:{port}", folder / "access.log")
    try:
        wait_for(running.url, process)
        yield running
    finally:
        process.terminate()
        process.communicate(timeout=30)


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    def answers() -> bool:
        if process.poll() is not None:
            pytest.fail(f"the router did not start: {(process.communicate()[1] or b'').decode()}")
        try:
            return httpx.get(f"{url}/health", timeout=10).status_code == 200
        except httpx.ConnectError:
            return False

    wait_until(answers)


def test_answers_pass_unchanged(router: Router, server: LocalServer) -> None:
    for path, request in (
        ("/v1/completions", body(24)),
        ("/v1/completions", body(24, vllm_xargs={"exit_threshold": "high"})),
        ("/v1/completions", body(24, stream_options=None, logprobs=2)),
    ):
        direct, routed = (
            httpx.post(f"{url}{path}", json=request, timeout=60) for url in (server.url, router.url)
        )
        assert routed.status_code == direct.status_code
        given, expected = routed.json(), direct.json()
        for key in ("choices", "exit_metrics", "usage", "error"):
            assert given.get(key) == expected.get(key)
        assert ("error" in given) == (direct.status_code == 400)


def test_streams_pass_unchanged_and_unbuffered(router: Router, server: LocalServer) -> None:
    routed, direct = (events(url, LONG) for url in (router.url, server.url))
    assert told(routed) == told(direct)
    assert told(routed)["exit_layers"] and told(routed)["exit_metrics"]
    # Events of a few hundred bytes: a buffer would hold back many at a time.
    last, count = routed[-1][0], len(routed)
    assert sum(came < last / 2 for came, _ in routed) > count / 4
    pauses = [after - before for (before, _), (after, _) in pairwise(routed)]
    assert sum(pause > last / count / 10 for pause in pauses) > count / 4


def test_sessions_stay_with_their_replica_and_others_spread(
    router: Router, server: LocalServer, second: LocalServer
) -> None:
    ports = {str(server.port), str(second.port)}
    assert {router.replica_of({}) for _ in range(4)} == ports
    first, again = (
        [router.replica_of({"X-Session-ID": session}) for session in SESSIONS] for _ in range(2)
    )
    assert first == again
    assert set(first) == ports


def generated(server: LocalServer) -> float:
    return metrics(server.url)["vllm:generation_tokens"]


class Crowd:
    """Clients that ask one request after the other, by names that nginx's log repeats."""

    def __init__(self, router: Router, clients: int) -> None:
        self._router, self._leaving = router, Event()
        self._pool = ThreadPoolExecutor(clients)
        self._clients = [self._pool.submit(self._ask, number) for number in range(clients)]

    def _ask(self, number: int) -> dict[str, dict[str, Any] | None]:
        found: dict[str, dict[str, Any] | None] = {}
        while not self._leaving.is_set():
            name = f"{number}-{len(found)}"
            url = f"{self._router.url}/v1/completions?name={name}"
            found[name] = None
            with suppress(httpx.HTTPError):
                answer = httpx.post(url, json=body(24, ignore_eos=True), timeout=60)
                if answer.status_code == 200:
                    (found[name],) = answer.json()["choices"]
        return found

    def answered(self) -> list[tuple[str, str]]:
        """Name and port of the requests that ended, in this order."""
        return re.findall(r"\?name=(\S+) .*, by .*:(\d+)$", self._router.log.read_text(), re.M)

    def leave(self) -> dict[str, dict[str, Any] | None]:
        """By name, the choice that each request got; None for an error."""
        self._leaving.set()
        self._pool.shutdown()
        return {name: one for client in self._clients for name, one in client.result().items()}


def counted_depths(server: LocalServer) -> Counter[str]:
    page = httpx.get(f"{server.url}/exitserve/stats", timeout=10).json()["since_start"]
    return Counter({depth: n for depth, n in page["tokens_by_exit_layer"].items() if n})


def test_a_replica_that_dies_is_started_again_and_all_is_counted_once(
    router: Router, server: LocalServer, second: LocalServer
) -> None:
    """Clients ask all the while, and lose nothing but what the replica had when it died."""
    before, clients = counted_depths(server), 4
    crowd = Crowd(router, clients)

    def of_second() -> set[str]:
        return {name for name, port in crowd.answered() if port == str(second.port)}

    wait_until(lambda: len(of_second()) > clients)
    os.killpg(second.pid, signal.SIGKILL)
    ended = len(crowd.answered())
    wait_until(lambda: len(crowd.answered()) > ended + 2 * clients)
    first_life = of_second()
    second.start()
    wait_until(lambda: len(of_second()) > len(first_life) + clients)
    answers = crowd.leave()
    wait_until(lambda: len(crowd.answered()) == len(answers))
    lost = {name for name, one in answers.items() if one is None}
    assert lost <= first_life and len(lost) <= clients
    assert len({one["text"] for one in answers.values() if one}) == 1
    for replica, names, earlier in (
        (second, of_second() - first_life, Counter[str]()),
        (server, answers.keys() - of_second(), before),
    ):
        given = filter(None, map(answers.__getitem__, names))
        seen = Counter(str(depth) for one in given for depth in one["exit_layers"])
        assert len(seen) > 1, "no token exits"
        wait_until(partial(counts, replica, earlier + seen))


def counts(server: LocalServer, depths: Counter[str]) -> bool:
    return counted_depths(server) == depths


def test_the_death_of_a_replica_harms_its_own_requests_only(
    router: Router, server: LocalServer, second: LocalServer
) -> None:
    headers = [{"X-Session-ID": session} for session in SESSIONS]
    homes = {router.replica_of(one): one for one in headers}
    alone, before = told(events(server.url, LONG)), len(router.replicas())
    made = {one: generated(one) for one in (server, second)}
    with ThreadPoolExecutor() as threads:
        stays, dies = (
            threads.submit(events, router.url, LONG, homes[str(one.port)])
            for one in (server, second)
        )
        wait_until(lambda: all(generated(one) > 8 + count for one, count in made.items()))
        os.killpg(second.pid, signal.SIGKILL)
        wait_until(lambda: not listens(second.port))
        statuses = list(threads.map(lambda one: ask(router, one), [*headers, {}, {}, {}, {}]))
        assert told(stays.result()) == alone
        with pytest.raises(httpx.RemoteProtocolError):
            dies.result()
    assert statuses == [200] * len(statuses)
    wait_until(lambda: len(router.replicas()) >= before + 2 + len(statuses))
    assert router.replicas()[before:].count(str(second.port)) == 1, "only the stream that broke off"


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def ask(router: Router, headers: dict[str, str]) -> int:
    url = f"{router.url}/v1/completions"
    return httpx.post(url, json=body(4), headers=headers, timeout=60).status_code
