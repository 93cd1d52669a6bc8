"""What is wrong with an answer, whatever was asked."""

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from .bodies import Body

LONGEST_ERROR = 300
"""Characters of an error's text."""


HEADERS = {"content-type": "application/json"}


def replies(url: str, bodies: Iterable[Body], clients: int = 8) -> Iterator[tuple[Body, int, str]]:
    """Each body with the status and text of its answer, sent by some clients at a time."""
    # A connection each: a server closes some after an error, which the next request would notice.
    limits = httpx.Limits(max_keepalive_connections=0)
    with (
        httpx.Client(base_url=url, headers=HEADERS, timeout=120, limits=limits) as client,
        ThreadPoolExecutor(clients) as pool,
    ):

        def ask(body: Body) -> tuple[Body, int, str]:
            answer = client.post(body.route, content=body.content)
            return body, answer.status_code, answer.text

        yield from pool.map(ask, bodies)


def fault(status: int, text: str) -> str | None:
    """Why a server should not have answered this; None for a good answer or a good error.

    Args:
        status: of the answer.
        text: its body.
    """
    if status >= 500:
        return f"status {status}: {text[:200]}"
    if status < 400:
        return _fault_of_stream(text) if text.startswith("data:") else None
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return f"status {status} without an error in JSON: {text[:200]}"
    return _fault_of_error(error)


def _fault_of_error(error: Any) -> str | None:
    message = error.get("message") if isinstance(error, dict) else None
    if not isinstance(message, str) or not message:
        return f"an error without a message: {str(error)[:200]}"
    if "\n" in message:
        return f"an error of several lines: {message[:200]!r}"
    if len(message) > LONGEST_ERROR or len(str(error)) > 3 * LONGEST_ERROR:
        return f"an error of {len(str(error))} characters: {message[:200]}"
    return None


def _fault_of_stream(text: str) -> str | None:
    """The fault of the errors in a stream of server-sent events."""
    for line in text.splitlines():
        if line.startswith('data: {"error"'):
            return _fault_of_error(json.loads(line.removeprefix("data: "))["error"])
    return None if text.rstrip().endswith("data: [DONE]") else "a stream without an end"
