"""Response fields of traced requests: `exit_layers` per choice, `exit_metrics` per response.

vLLM names the requests behind one HTTP call `cmpl-X-{prompt}-{random}` or `chatcmpl-X-{random}`,
with `{sample}_` in front when n > 1. From that follows which choice a trace belongs to.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

_SAMPLE = re.compile(r"^(\d+)_(?:cmpl|chatcmpl)-")
_PROMPT = re.compile(r"-(\d+)-[0-9a-f]{8}$")

Depths = dict[int, int]
"""Index of a generated token to the depth it stopped at."""


def choice_index(request_id: str, samples: int, *, chat: bool) -> int:
    """The choice that the engine's request `request_id` fills; `samples` is n."""
    sample = _SAMPLE.match(request_id)
    prompt = None if chat else _PROMPT.search(request_id)
    return (int(prompt[1]) if prompt else 0) * samples + (int(sample[1]) if sample else 0)


def exit_metrics(layers: list[list[int]], num_layers: int) -> dict[str, Any]:
    """Totals over the choices of one response; null depths where nothing was generated."""
    depths = [depth for choice in layers for depth in choice]
    total = sum(depths)
    return {
        "tokens": len(depths),
        "mean_depth": total / len(depths) if depths else None,
        "depth_speedup": num_layers * len(depths) / total if depths else None,
    }


class TraceFields:
    """Adds the trace of one HTTP request to its response."""

    def __init__(
        self,
        take: Callable[[], Awaitable[dict[str, Depths]]],
        *,
        samples: int,
        chat: bool,
        num_layers: int,
        keep_token_ids: bool,
    ) -> None:
        """Prepares to decorate one response.

        Args:
            take: asks the worker for what it recorded since the last call.
            samples: n of the request.
            chat: a chat completion (choices are numbered by sample alone).
            num_layers: L.
            keep_token_ids: the client asked for token ids itself; else they are taken out again
                (they are requested in any case, to know how many tokens a choice has).
        """
        self._take = take
        self._samples = samples
        self._chat = chat
        self._num_layers = num_layers
        self._keep_token_ids = keep_token_ids
        self._depths: dict[int, Depths] = {}
        self._counts: dict[int, int] = {}

    async def response(self, body: dict[str, Any]) -> dict[str, Any]:
        """Decorates a whole (not streamed) response."""
        self._count(body)
        await self._collect()
        self._put_layers(body["choices"])
        body["exit_metrics"] = self._metrics()
        return body

    async def stream(self, events: AsyncIterator[Any]) -> AsyncIterator[str]:
        """Decorates a stream of server-sent events.

        A chunk that finishes a choice carries the choice's `exit_layers`. Such a chunk is held
        back until the next event, so that the last one, and a usage chunk after it, can carry
        `exit_metrics`.
        """
        held: dict[str, Any] | None = None
        async for event in events:
            text = event.decode() if isinstance(event, bytes) else str(event)
            chunk = _parse(text)
            if chunk is None or "choices" not in chunk:  # keep-alives, errors, [DONE]
                if held is not None:
                    yield _event({**held, "exit_metrics": self._metrics()})
                    held = None
                yield text
                continue
            self._count(chunk)
            if held is not None:
                closing = not chunk["choices"]
                yield _event({**held, "exit_metrics": self._metrics()} if closing else held)
                held = None
                if closing:
                    chunk["exit_metrics"] = self._metrics()
            finished = [c for c in chunk["choices"] if c.get("finish_reason") is not None]
            if finished:
                await self._collect()
                self._put_layers(finished)
                held = chunk
            else:
                yield _event(chunk)

    def _count(self, body: dict[str, Any]) -> None:
        for choice in body["choices"]:
            index = choice["index"]
            self._counts[index] = self._counts.get(index, 0) + len(choice.get("token_ids") or ())
            if not self._keep_token_ids:
                choice.pop("token_ids", None)
                choice.pop("prompt_token_ids", None)
        if not self._keep_token_ids:
            body.pop("prompt_token_ids", None)

    async def _collect(self) -> None:
        for request_id, depths in (await self._take()).items():
            index = choice_index(request_id, self._samples, chat=self._chat)
            self._depths.setdefault(index, {}).update(depths)

    def _layers(self, index: int) -> list[int]:
        # The engine may run past a stop string before it is told to stop: cut to what was sent.
        depths = self._depths.get(index, {})
        return [depths[token] for token in sorted(depths)][: self._counts.get(index, 0)]

    def _put_layers(self, choices: list[dict[str, Any]]) -> None:
        for choice in choices:
            choice["exit_layers"] = self._layers(choice["index"])

    def _metrics(self) -> dict[str, Any]:
        return exit_metrics([self._layers(i) for i in sorted(self._counts)], self._num_layers)


def _parse(event: str) -> dict[str, Any] | None:
    """The JSON object of a `data:` event; None for anything else."""
    if not event.startswith("data: {"):
        return None
    parsed = json.loads(event.removeprefix("data: "))
    return parsed if isinstance(parsed, dict) else None


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
