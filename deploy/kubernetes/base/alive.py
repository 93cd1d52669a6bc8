"""Whether a server's engine moves: exits with 0 if it does, and says in one line why not.

    python3 alive.py --url http://127.0.0.1:8000 --wait 60

`/health` says only that the engine's process lives. This asks for one token. If none comes in time
the server may be busy: then the counts that the engine reports with each step have moved meanwhile.
Those of an engine that hangs stand still. Of several engines (data parallelism) each is asked.

The standard library only: it runs as the liveness probe of a pod. The API key, if there is one, is
the server's own: `VLLM_API_KEY`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from http.client import HTTPException

STEPS = re.compile(
    r"^vllm:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc"
    r'|prompt_tokens_total|generation_tokens_total)\{.*?engine="(\d+)".*$',
    re.MULTILINE,
)
"""Samples of `/metrics` that the API process sets only when the engine has reported a step."""
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Through no proxy of the environment: the server is in the same pod."""
PATIENCE = 10.0
"""Seconds within which the API process itself must answer."""


def fetch(url: str, body: object = None, wait: float = PATIENCE, engine: str | None = None) -> str:
    """What the server answers to a GET, or to a POST of `body`.

    Args:
        url: of what is asked for.
        body: sent as JSON.
        wait: seconds.
        engine: of several, the one that is to answer.

    Raises:
        OSError, HTTPException: it did not answer in time, or with an error.
    """
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("VLLM_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    if engine is not None:
        headers["X-data-parallel-rank"] = engine
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    with DIRECT.open(request, timeout=wait) as answer:
        return str(answer.read().decode())


def steps(url: str) -> dict[str, list[str]]:
    """What each engine last reported of its steps."""
    found: dict[str, list[str]] = {}
    for sample in STEPS.finditer(fetch(f"{url}/metrics")):
        found.setdefault(sample[1], []).append(sample[0])
    return found


class Question(threading.Thread):
    """Asks an engine for a token.

    In a thread, so that the counts are read before the request is given up: that moves some.
    """

    def __init__(self, url: str, model: str, wait: float, engine: str | None) -> None:
        """Takes the server, its model, seconds to wait, and of several engines the one to ask."""
        super().__init__(daemon=True)
        self._asked = f"{url}/v1/completions", model, wait, engine
        self.error: Exception | None = None

    def run(self) -> None:
        """Asks."""
        url, model, wait, engine = self._asked
        body = {"model": model, "prompt": "a", "max_tokens": 1}
        try:
            fetch(url, body, wait + PATIENCE, engine)
        except (OSError, HTTPException) as error:
            self.error = error


def fault(url: str, wait: float) -> str | None:
    """Why an engine seems to hang; None if all move.

    Raises:
        OSError, HTTPException: the API process does not answer, or with an error.
    """
    model = json.loads(fetch(f"{url}/v1/models"))["data"][0]["id"]
    before = steps(url)
    engines: list[str | None] = [*sorted(before)] if len(before) > 1 else [None]
    asked = {engine: Question(url, model, wait, engine) for engine in engines}
    for question in asked.values():
        question.start()
    end = time.monotonic() + wait
    for question in asked.values():
        question.join(max(0.0, end - time.monotonic()))
    silent = [engine for engine, question in asked.items() if question.is_alive()]
    errors = [question.error for question in asked.values() if question.error is not None]
    if not silent:
        return str(errors[0]) if errors else None
    after = steps(url)
    if len(before) <= 1:
        return None if after != before else f"no token and no step in {wait:g} s: the engine hangs."
    hung = [engine for engine in silent if after.get(engine) == before.get(engine)]
    if not hung:
        return None
    return f"no token and no step in {wait:g} s: engine {', '.join(hung)} hangs."


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds for one token")
    args = parser.parse_args()
    try:
        found = fault(args.url, args.wait)
    except (OSError, HTTPException) as error:
        found = f"{args.url} does not answer: {error}"
    if found:
        print(found, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
