"""Whether a server's engine moves: exits with 0 if it does, and says in one line why not.

    python3 alive.py --url http://127.0.0.1:8000 --wait 60

`/health` says only that the engine's process lives. This asks for one token. If none comes in time
the server may be busy: then the counts that the engine reports with each step have moved meanwhile.
Those of an engine that hangs stand still.

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
import urllib.error
import urllib.request
from http.client import HTTPException

STEPS = re.compile(
    r"^vllm:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc"
    r"|prompt_tokens_total|generation_tokens_total)\{.*$",
    re.MULTILINE,
)
"""Samples of `/metrics` that the API process sets only when the engine has reported a step."""
PATIENCE = 10.0
"""Seconds within which the API process itself must answer."""


def fetch(url: str, body: object = None, wait: float = PATIENCE) -> str:
    """What the server answers to a GET, or to a POST of `body`.

    Raises:
        OSError, HTTPException: it did not answer in time, or with an error.
    """
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("VLLM_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    with urllib.request.urlopen(request, timeout=wait) as answer:
        return str(answer.read().decode())


def steps(url: str) -> list[str]:
    """What the engine last reported of its steps."""
    return STEPS.findall(fetch(f"{url}/metrics"))


def fault(url: str, wait: float) -> str | None:
    """Why the engine seems to hang; None if it moves.

    Raises:
        OSError, HTTPException: the API process does not answer, or with an error.
    """
    model = json.loads(fetch(f"{url}/v1/models"))["data"][0]["id"]
    before = steps(url)
    answered = threading.Event()
    errors: list[Exception] = []

    def ask() -> None:
        body = {"model": model, "prompt": "a", "max_tokens": 1}
        try:
            fetch(f"{url}/v1/completions", body, wait + PATIENCE)
        except (OSError, HTTPException) as error:
            errors.append(error)
        answered.set()

    # In a thread, so that the counts are read before the request is given up: that moves some.
    threading.Thread(target=ask, daemon=True).start()
    if answered.wait(wait):
        return str(errors[0]) if errors else None
    if steps(url) != before:
        return None
    return f"no token and no step in {wait:g} s: the engine hangs."


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
