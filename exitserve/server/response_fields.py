"""Response fields: `exit_layers` and `exit_trace` per choice, the others per response.

vLLM names the requests behind one HTTP call `cmpl-X-{prompt}-{random}` or `chatcmpl-X-{random}`,
with `{sample}_` in front if n > 1. These names tell which choice a trace belongs to.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from exitserve.server.full_trace import FullTrace, NotesByIndex

PACE_SECONDS = 0.15
"""How often a stream asks the worker for full traces, which it answers between two steps."""

_SAMPLE = re.compile(r"^(\d+)_(?:cmpl|chatcmpl)-")
_PROMPT = re.compile(r"-(\d+)-[0-9a-f]{8}$")

Depths = dict[int, int]
"""Index of a generated token to the depth at which it stopped."""


def choice_index(request_id: str, samples: int, *, chat: bool) -> int:
    """The index of the choice that an engine request generates; `samples` is n."""
    sample = _SAMPLE.match(request_id)
    prompt = None if chat else _PROMPT.search(request_id)
    return (int(prompt[1]) if prompt else 0) * samples + (int(sample[1]) if sample else 0)


def exit_metrics(layers: list[list[int] | None], num_layers: int) -> dict[str, Any] | None:
    """Totals over the choices of one response; averages are None without tokens.

    None if a choice's depths are not known.
    """
    known = [choice for choice in layers if choice is not None]
    if len(known) < len(layers):
        return None
    depths = [depth for choice in known for depth in choice]
    total = sum(depths)
    return {
        "tokens": len(depths),
        "mean_depth": total / len(depths) if depths else None,
        "depth_speedup": num_layers * len(depths) / total if depths else None,
    }


class RequestTrace:
    """The depths of one HTTP request's tokens, collected while its response is built."""

    def __init__(
        self,
        take: Callable[[], Awaitable[dict[str, Depths]]],
        *,
        samples: int,
        chat: bool,
        num_layers: int,
        keep_token_ids: bool,
        full: FullTrace | None = None,
        take_notes: Callable[[], Awaitable[dict[str, NotesByIndex]]] | None = None,
    ) -> None:
        """Starts without depths.

        Args:
            take: returns the depths that the worker recorded since the last call, or none if it
                cannot be asked.
            samples: n of the request.
            chat: a chat completion, whose choices are numbered by sample only.
            num_layers: L.
            keep_token_ids: the client asked for token ids. They are always requested, to count the
                tokens of a choice, and otherwise removed from the response.
            full: takes what tokens met; None: only depths were asked for.
            take_notes: returns that from the worker, like `take`.
        """
        self._full, self._take_notes = full, take_notes
        self._taken_at = 0.0
        self._take = take
        self._samples = samples
        self._chat = chat
        self._num_layers = num_layers
        self._keep_token_ids = keep_token_ids
        self._depths: dict[int, Depths] = {}
        self._counts: dict[int, int | None] = {}

    def count(self, body: dict[str, Any]) -> None:
        """Counts the tokens of a response or chunk, and removes ids that were not asked for."""
        for choice in body["choices"]:
            count = self._counts.setdefault(choice["index"], None)
            if self._full is not None and (ids := _prompt_ids(choice, body)):
                self._full.start(choice["index"], ids)
            if choice.get("token_ids") is not None:
                self._counts[choice["index"]] = (count or 0) + len(choice["token_ids"])
                if self._full is not None:
                    self._full.add_tokens(choice["index"], choice["token_ids"])
            if not self._keep_token_ids:
                choice.pop("token_ids", None)
                choice.pop("prompt_token_ids", None)
        if not self._keep_token_ids:
            body.pop("prompt_token_ids", None)

    async def put_layers(self, choices: list[dict[str, Any]]) -> None:
        """Adds `exit_layers` and `exit_trace` to finished choices, null without all depths."""
        await self._ask_worker()
        for choice in choices:
            index = choice["index"]
            layers = choice["exit_layers"] = self._layers(index)
            if self._full is not None:
                found = self._full.take(index, self._depths.get(index, {}))
                choice["exit_trace"] = None if layers is None else found

    async def put_known(self, choices: list[dict[str, Any]]) -> None:
        """Adds `exit_trace` to choices of a stream that goes on: the tokens that are known by now.

        The worker is asked now and then only, so a stream with a full trace is hardly slower.
        """
        if self._full is None:
            return
        if time.monotonic() - self._taken_at > PACE_SECONDS:
            await self._ask_worker()
        for choice in choices:
            found = self._full.take(choice["index"], self._depths.get(choice["index"], {}))
            if found["tokens"]:
                choice["exit_trace"] = found

    async def _ask_worker(self) -> None:
        """Takes depths, then notes: so the notes of every token whose depth is known are there."""
        self._taken_at = time.monotonic()
        for request_id, depths in (await self._take()).items():
            self._depths.setdefault(self._index(request_id), {}).update(depths)
        if self._full is None or self._take_notes is None:
            return
        for request_id, notes in (await self._take_notes()).items():
            self._full.add_notes(self._index(request_id), notes)

    def _index(self, request_id: str) -> int:
        return choice_index(request_id, self._samples, chat=self._chat)

    def metrics(self) -> dict[str, Any] | None:
        """The response's `exit_metrics`; None if depths are missing."""
        return exit_metrics([self._layers(i) for i in sorted(self._counts)], self._num_layers)

    def _layers(self, index: int) -> list[int] | None:
        """The depths of a choice's tokens, in order; None if one is missing.

        The engine may be gone, or may have dropped the trace of a request that waited for long.
        """
        depths = self._depths.get(index, {})
        # The engine may run past a stop string before it is stopped: cut to the tokens sent. If
        # vLLM hides token ids (of reasoning that it leaves out), all depths are returned.
        count = self._counts.get(index)
        if count is None:
            count = max(depths, default=0) + 1
        layers = [depths[token] for token in range(count) if token in depths]
        return layers if len(layers) == count else None


class ExitFields:
    """Adds our fields to the response of one HTTP request, whole or streamed."""

    def __init__(
        self, trace: RequestTrace | None = None, *, logprobs_from_exits: bool = False
    ) -> None:
        """Sets which fields are added.

        Args:
            trace: for `exit_layers` in each choice and `exit_metrics`; None if not asked for.
            logprobs_from_exits: the response has log-probabilities of tokens that may have exited;
                `logprobs_from` says so.
        """
        self._trace = trace
        self._logprobs_from_exits = logprobs_from_exits

    async def response(self, body: dict[str, Any]) -> dict[str, Any]:
        """Adds the fields to a response that is not streamed."""
        if self._trace is not None:
            self._trace.count(body)
            await self._trace.put_layers(body["choices"])
        return body | self._totals()

    async def stream(self, events: AsyncIterator[Any]) -> AsyncIterator[str]:
        """Adds the fields to a stream of server-sent events.

        A chunk that finishes a choice gets the choice's `exit_layers`. It is held back until the
        next event, so that the last such chunk, and a usage chunk after it, can get the fields of
        the whole response.
        """
        held: dict[str, Any] | None = None
        async for event in events:
            text = event.decode() if isinstance(event, bytes) else str(event)
            chunk = _parse(text)
            if text.startswith(":"):  # a keep-alive between chunks
                yield text
                continue
            if chunk is None or "choices" not in chunk:  # errors, [DONE]
                if held is not None:
                    yield _event(held | self._totals())
                    held = None
                yield text
                continue
            if self._trace is not None:
                self._trace.count(chunk)
            is_usage = not chunk["choices"]
            if held is not None:
                yield _event(held | self._totals() if is_usage else held)
                held = None
                if is_usage:
                    chunk |= self._totals()
            finished = [c for c in chunk["choices"] if c.get("finish_reason") is not None]
            if finished:
                if self._trace is not None:
                    await self._trace.put_layers(finished)
                held = chunk
            else:
                if self._trace is not None:
                    await self._trace.put_known(chunk["choices"])
                yield _event(chunk)

    def _totals(self) -> dict[str, Any]:
        """The fields of the whole response."""
        fields: dict[str, Any] = {}
        if self._trace is not None:
            fields["exit_metrics"] = self._trace.metrics()
        if self._logprobs_from_exits:
            fields["logprobs_from"] = "exit_layer"
        return fields


def _prompt_ids(choice: dict[str, Any], body: dict[str, Any]) -> list[int] | None:
    """The prompt of a choice, which completions name in the choice, and chats in the body."""
    return choice.get("prompt_token_ids") or body.get("prompt_token_ids")


def _parse(event: str) -> dict[str, Any] | None:
    """The JSON object of a `data:` event; None for anything else."""
    if not event.startswith("data: {"):
        return None
    parsed = json.loads(event.removeprefix("data: "))
    return parsed if isinstance(parsed, dict) else None


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
