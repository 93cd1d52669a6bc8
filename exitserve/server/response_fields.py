"""Response fields, and what is asked of workers for them: `exit_layers` of each choice, the others
of the response.

vLLM names the requests behind one HTTP call `cmpl-X-{prompt}-{random}` or `chatcmpl-X-{random}`,
with `{sample}_` in front if n > 1. These names tell which choice a trace belongs to.

Every wait for a worker has an end. vLLM answers between two steps of its engine. A step may take
seconds, and an engine that hangs or has died never answers: a request that waited for it would not
end, and the server waits for its requests before it stops.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from exitserve.engine.recorder import TraceKeys
from exitserve.server.metrics import Snapshot

logger = logging.getLogger(__name__)

_SAMPLE = re.compile(r"^(\d+)_(?:cmpl|chatcmpl)-")
_PROMPT = re.compile(r"-(\d+)-[0-9a-f]{8}$")

Traced = dict[int, tuple[int, str]]
"""Index of a generated token to the depth at which it stopped, and the source of the draft that it
was, empty for none."""


ANSWER_SECONDS = 30.0
"""The longest wait for an answer: long enough for a step with long prompts on a CPU."""
FAILURE_SECONDS = 0.25
"""How soon a failure of the engine ends a wait."""


def choice_index(request_id: str, samples: int, *, chat: bool) -> int:
    """The index of the choice that an engine request generates; `samples` is n."""
    sample = _SAMPLE.match(request_id)
    prompt = None if chat else _PROMPT.search(request_id)
    return (int(prompt[1]) if prompt else 0) * samples + (int(sample[1]) if sample else 0)


def exit_metrics(
    choices: list[list[tuple[int, str]] | None], num_layers: int
) -> dict[str, Any] | None:
    """Totals over the choices of one response; averages are None without tokens.

    None if a choice's tokens were not traced.
    """
    known = [choice for choice in choices if choice is not None]
    if len(known) < len(choices):
        return None
    depths = [depth for choice in known for depth, _ in choice]
    total = sum(depths)
    return {
        "tokens": len(depths),
        "mean_depth": total / len(depths) if depths else None,
        "depth_speedup": num_layers * len(depths) / total if depths else None,
        "accepted_drafts": Counter(source for choice in known for _, source in choice if source),
    }


class NoAnswerError(RuntimeError):
    """The worker gave no answer: its engine failed, is stopping, or takes too long."""


class WorkerClient:
    """Calls of `exitserve.engine.hooks.worker_extension.ExitWorkerExtension`, of every engine."""

    def __init__(self, engine_client: Any, *, answer_seconds: float = ANSWER_SECONDS) -> None:
        """Asks nothing yet; waits so many seconds for each answer at most."""
        self._engine = engine_client
        self._answer_seconds = answer_seconds

    async def attach(self) -> None:
        """Tells the workers that vLLM's engines are complete."""
        await self._ask("exit_attach")

    async def counts(self) -> dict[int, Snapshot]:
        """By engine, its data-parallel rank, the counts since its worker's start."""
        counts: list[Snapshot] = await self._ask("exit_stats")
        return dict(zip(self._engine.engine_core.engine_ranks_managed, counts, strict=True))

    async def take_traces(self, key: str) -> dict[str, Traced]:
        """Removes and returns the depths that the workers recorded under `key`.

        None if a worker is away: a finished answer is worth more than its depths.
        """
        try:
            # Each sample of a request runs on one engine, several on as many as the router chose.
            found: list[dict[str, Traced]] = await self._ask("exit_take_traces", key)
        except NoAnswerError:
            return {}
        return {name: one for engine in found for name, one in engine.items()}

    async def _ask(self, method: str, *args: Any) -> list[Any]:
        """Of each engine, its first rank's answer.

        Raises:
            NoAnswerError: there is none.
        """
        # One that comes later finds nobody waiting for it: vLLM drops it.
        # vLLM's own `collective_rpc` of a client gives the first engine's answers only.
        ask = self._engine.engine_core.call_utility_all_async
        call = asyncio.ensure_future(ask("collective_rpc", method, None, args, None))
        clock = asyncio.get_running_loop().time
        end = clock() + self._answer_seconds
        try:
            while not call.done():
                # Nothing ends a call when the engine fails (`AsyncMPClient.utility_results`).
                if self._engine.errored:
                    raise NoAnswerError("the engine has failed.")
                if clock() >= end:
                    logger.warning("the engine did not answer in %.0f s", self._answer_seconds)
                    raise NoAnswerError("the engine does not answer.")
                await asyncio.wait({call}, timeout=min(FAILURE_SECONDS, max(0, end - clock())))
            return [ranks[0] for ranks in call.result()]
        except NoAnswerError:
            raise
        except Exception as error:  # vLLM's refusals, as of a server that stops, have no type
            raise NoAnswerError(f"the engine cannot be asked: {error}") from error
        finally:
            call.cancel()


class RequestTrace:
    """The depths of one HTTP request's tokens, collected while its response is built."""

    def __init__(
        self,
        take: Callable[[], Awaitable[dict[str, Traced]]],
        *,
        samples: int,
        chat: bool,
        num_layers: int,
        keep_token_ids: bool,
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
        """
        self._take = take
        self._samples = samples
        self._chat = chat
        self._num_layers = num_layers
        self._keep_token_ids = keep_token_ids
        self._traced: dict[int, Traced] = {}
        self._counts: dict[int, int | None] = {}

    @classmethod
    def of(cls, request: Any, worker: WorkerClient, num_layers: int, *, chat: bool) -> RequestTrace:
        """The trace of a request, under a new key, which the request takes."""
        key = uuid.uuid4().hex
        request.vllm_xargs["exit_trace"] = TraceKeys([key])
        keep_token_ids, request.return_token_ids = bool(request.return_token_ids), True
        return cls(
            lambda: worker.take_traces(key),
            samples=request.n or 1,
            chat=chat,
            num_layers=num_layers,
            keep_token_ids=keep_token_ids,
        )

    def count(self, body: dict[str, Any]) -> None:
        """Counts the tokens of a response or chunk, and removes ids that were not asked for."""
        for choice in body["choices"]:
            count = self._counts.setdefault(choice["index"], None)
            if choice.get("token_ids") is not None:
                self._counts[choice["index"]] = (count or 0) + len(choice["token_ids"])
            if not self._keep_token_ids:
                choice.pop("token_ids", None)
                choice.pop("prompt_token_ids", None)
        if not self._keep_token_ids:
            body.pop("prompt_token_ids", None)

    async def put_layers(self, choices: list[dict[str, Any]]) -> None:
        """Adds `exit_layers` to finished choices, null without all depths."""
        for request_id, traced in (await self._take()).items():
            index = choice_index(request_id, self._samples, chat=self._chat)
            self._traced.setdefault(index, {}).update(traced)
        for choice in choices:
            tokens = self._tokens(choice["index"])
            choice["exit_layers"] = tokens and [depth for depth, _ in tokens]

    def metrics(self) -> dict[str, Any] | None:
        """The response's `exit_metrics`; None if depths are missing."""
        return exit_metrics([self._tokens(i) for i in sorted(self._counts)], self._num_layers)

    def _tokens(self, index: int) -> list[tuple[int, str]] | None:
        """What was traced of a choice's tokens, in order; None if one is missing.

        The engine may be gone, or may have dropped the trace of a request that waited for long.
        """
        traced = self._traced.get(index, {})
        # The engine may run past a stop string before it is stopped: cut to the tokens sent. If
        # vLLM hides token ids (of reasoning that it leaves out), all depths are returned.
        count = self._counts.get(index)
        if count is None:
            count = max(traced, default=0) + 1
        tokens = [traced[token] for token in range(count) if token in traced]
        return tokens if len(tokens) == count else None


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
                yield _event(chunk)

    def _totals(self) -> dict[str, Any]:
        """The fields of the whole response."""
        fields: dict[str, Any] = {}
        if self._trace is not None:
            fields["exit_metrics"] = self._trace.metrics()
        if self._logprobs_from_exits:
            fields["logprobs_from"] = "exit_layer"
        return fields


def _parse(event: str) -> dict[str, Any] | None:
    """The JSON object of a `data:` event; None for anything else."""
    if not event.startswith("data: {"):
        return None
    parsed = json.loads(event.removeprefix("data: "))
    return parsed if isinstance(parsed, dict) else None


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
