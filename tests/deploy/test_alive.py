"""The liveness probe against stand-ins of a server: one that answers, is busy, hangs, or is gone.

Against a real one: `tests/e2e/test_liveness.py`.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

PROBE = Path(__file__).parents[2] / "deploy" / "kubernetes" / "base" / "alive.py"
KEY = "a-key"
ENGINE = 'vllm:generation_tokens_total{engine="0",model_name="m"}'
PROCESS = "process_cpu_seconds_total"


@contextmanager
def server(*, slow: bool, moves: str = "", key: str = "") -> Iterator[str]:
    """The address of a stand-in.

    Args:
        slow: it gives no token before the probe has gone.
        moves: the series of `/metrics` that is another each time.
        key: what requests must carry.
    """
    gone = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                values = dict.fromkeys((ENGINE, PROCESS), 1.0) | {moves: time.monotonic()}
                self.answer("\n".join(f"{k} {v}" for k, v in values.items() if k))
            else:
                self.answer(json.dumps({"data": [{"id": "m"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert (body["model"], body["max_tokens"]) == ("m", 1)
            if slow:
                gone.wait(60)
            self.answer("{}")

        def answer(self, text: str) -> None:
            allowed = not key or self.headers["Authorization"] == f"Bearer {key}"
            self.send_response(200 if allowed else 401)
            self.end_headers()
            if not gone.is_set():
                self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_port}"
    gone.set()
    listening.shutdown()
    listening.server_close()


def probe(url: str, key: str = "") -> subprocess.CompletedProcess[str]:
    """Runs it as a pod does, but for the wait; a proxy that is not there is never asked."""
    command = [sys.executable, str(PROBE), "--url", url, "--wait", "0.5"]
    environment = {"http_proxy": "http://127.0.0.1:9"} | ({"VLLM_API_KEY": key} if key else {})
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def test_a_server_that_answers_lives():
    with server(slow=False) as url:
        assert probe(url).returncode == 0


def test_a_busy_server_lives():
    with server(slow=True, moves=ENGINE) as url:
        assert probe(url).returncode == 0


@pytest.mark.parametrize("moves", ["", PROCESS])
def test_a_server_whose_engine_reports_no_steps_hangs(moves):
    with server(slow=True, moves=moves) as url:
        done = probe(url)
    assert (done.returncode, done.stderr) == (
        1,
        "no token and no step in 0.5 s: the engine hangs.\n",
    )


def test_it_carries_the_key_of_the_server():
    with server(slow=False, key=KEY) as url:
        assert probe(url, KEY).returncode == 0
        assert "401" in probe(url, "another").stderr
