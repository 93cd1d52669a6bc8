"""Checks a server before tasks are sent to it: is it exitserve, and does it serve this model?"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exitserve.errors import ExitServeError
from exitserve.policy import ExitRules

TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A server that answers for the model."""

    url: str
    """Without a path."""
    name: str
    """Model name, as requests send it."""
    context: int
    """Most tokens of a request, prompt and answer together."""


def find_endpoint(url: str, model: str, rules: ExitRules) -> Endpoint:
    """Asks a server what it serves.

    Args:
        url: with or without `/v1` at its end.
        model: the checkpoint that it should serve.
        rules: that checkpoint's exits.

    Raises:
        ExitServeError: it does not answer, is not exitserve, or serves another model.
    """
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise ExitServeError(f"--endpoint '{url}' is not a URL; write http://HOST:PORT.")
    card = _model_card(url)
    try:
        stats = _get(f"{url}/exitserve/stats")
    except urllib.error.HTTPError as error:
        raise ExitServeError(
            f"--endpoint '{url}' is not an exitserve server (/exitserve/stats answers "
            f"{error.code}); start one with `exitserve serve {model}`."
        ) from error
    served = str(card.get("root") or card["id"])
    names = {Path(served).name, Path(str(card["id"])).name}
    if Path(model).resolve().name not in names:
        raise ExitServeError(
            f"--endpoint '{url}' serves '{served}', not '{model}'; give its URL, or leave "
            f"--endpoint out to start a server."
        )
    exits = (stats["num_layers"], tuple(stats["exit_layers"]))
    if exits != (rules.num_layers, rules.exit_layers):
        raise ExitServeError(
            f"--endpoint '{url}' serves {exits[0]} layers with exits {list(exits[1])}, but "
            f"'{model}' has {rules.num_layers} with exits {list(rules.exit_layers)}: that is "
            f"another checkpoint."
        )
    return Endpoint(url=url, name=str(card["id"]), context=int(card["max_model_len"]))


def _model_card(url: str) -> dict[str, Any]:
    try:
        card: dict[str, Any] = _get(f"{url}/v1/models")["data"][0]
    except (OSError, ValueError) as error:  # HTTP errors and refused connections are OSErrors
        reason = getattr(error, "reason", None) or error
        raise ExitServeError(
            f"--endpoint '{url}' does not answer ({reason}); is the server running there?"
        ) from error
    except (KeyError, IndexError, TypeError) as error:
        raise ExitServeError(
            f"--endpoint '{url}' does not list its models as vLLM does."
        ) from error
    return card


def check_fields(endpoint: Endpoint, settings: Iterable[Mapping[str, Any]]) -> None:
    """Sends a request of one token for each set of fields.

    Raises:
        ExitServeError: the server refuses one; the message gives its reason.
    """
    for fields in settings:
        body = {"model": endpoint.name, "prompt": [1], "max_tokens": 1, "vllm_xargs": dict(fields)}
        request = urllib.request.Request(
            f"{endpoint.url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):
                pass
        except urllib.error.HTTPError as error:
            raise ExitServeError(
                f"the server at {endpoint.url} refuses {json.dumps(dict(fields))}: "
                f"{_message_of(error)}"
            ) from error
        except OSError as error:
            raise ExitServeError(f"the server at {endpoint.url} stopped answering.") from error


def _message_of(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {error.code}"


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
        return json.loads(answer.read())
