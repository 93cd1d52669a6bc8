"""A running server as our routes use it, and what it asks of its engines' workers.

Every wait for a worker has an end. vLLM answers between two steps of its engine. A step may take
seconds, and an engine that hangs or has died never answers: a request that waited for it would not
end, and the server waits for its requests before it stops.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from contextlib import suppress
from typing import Any

from vllm.v1.metrics.prometheus import get_prometheus_registry

from exitserve.engine.options import rules_from
from exitserve.engine.recorder import TraceKeys
from exitserve.engine.requests import FieldCheck
from exitserve.server.metrics import (
    ExitMetrics,
    ShadowMetrics,
    Snapshot,
    export_calibrated_agreement,
)
from exitserve.server.response_fields import RequestTrace, Traced
from exitserve.server.shadow_evaluation import ShadowEvaluation
from exitserve.server.stats_window import StatsWindow

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
"""How often counts are sampled while requests are served, for the sums of the last minute."""
ANSWER_SECONDS = 30.0
"""The longest wait for an answer: long enough for a step with long prompts on a CPU."""
FAILURE_SECONDS = 0.25
"""How soon a failure of the engine ends a wait."""
PATIENCE_SECONDS = 0.8
"""How long a page of counts waits for new ones before it shows the last."""


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
        """Removes and returns the depths that the workers recorded under `key`."""
        return await self._take("exit_take_traces", key)

    async def _take(self, method: str, key: str) -> dict[str, Any]:
        # Each sample of a request runs on one engine, several on as many as the router chose.
        found: list[dict[str, Any]] = await self._ask(method, key)
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


class LatestCounts:
    """The workers' counts, read when somebody looks, and the last ones while one is busy.

    One reading is under way at a time, and all who look share it. So readings arrive in the order
    in which they were taken: an older one on top of a newer would pass for a restart of the worker
    (`exitserve.server.metrics.advance`).
    """

    def __init__(
        self, worker: WorkerClient, metrics: ExitMetrics | None, window: StatsWindow
    ) -> None:
        """Knows no counts yet; takes no metrics where another API process raises them."""
        self._worker = worker
        self._metrics = metrics
        self._window = window
        self._read_at = time.monotonic()
        self._reading: asyncio.Task[None] | None = None

    async def read(self) -> None:
        """Reads the counts.

        Raises:
            NoAnswerError: they cannot be had.
        """
        counts = await self._worker.counts()
        self._read_at = time.monotonic()
        self._window.add(self._read_at, counts)
        if self._metrics is not None:
            for engine, snapshot in counts.items():
                self._metrics.update(snapshot, engine)

    async def refresh(self, patience: float | None = None) -> None:
        """Waits for a reading that is not older than this call.

        Args:
            patience: seconds after which the last counts must do; None: as long as it takes.
        """
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._try_to_read())
        await asyncio.wait({self._reading}, timeout=patience)

    async def _try_to_read(self) -> None:
        with suppress(NoAnswerError):
            await self.read()

    def report(self) -> dict[str, Any]:
        """`StatsWindow.report`, and how old the counts are."""
        now = time.monotonic()
        return {**self._window.report(now), "age_seconds": round(now - self._read_at, 3)}


class ExitServer:
    """The state of the running server that our routes use."""

    def __init__(
        self, engine_client: Any, model_name: str, shadow_rate: float, *, chats: bool
    ) -> None:
        self.engine = engine_client
        self.chats = chats
        """Whether the model has a chat template that tells who speaks."""
        self.worker = WorkerClient(engine_client)
        self._model_name = model_name
        self._shadow_rate = shadow_rate
        self.rules = rules_from(engine_client.vllm_config)
        core = engine_client.engine_core
        self._alone = core.client_count == 1
        """Whether no other API process serves the same engines."""
        self._exports = core.client_index == 0
        """Whether this one exports what it reads from them: `/metrics` adds up all processes."""
        metrics = ExitMetrics(get_prometheus_registry(), model_name) if self._exports else None
        self.counts = LatestCounts(self.worker, metrics, StatsWindow())
        self.open_requests = 0
        self.unsampled = False
        """Whether a request has ended since the last sample."""
        self._poller: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Attaches to the worker and starts to read its counts."""
        FieldCheck.rules, FieldCheck.serves_clients = self.rules, True
        await self.worker.attach()
        await self.counts.read()
        self._poller = asyncio.create_task(self._poll())
        self._follow_quality()

    def _follow_quality(self) -> None:
        """Exports the promised agreement, and starts to compare a share of the answers."""
        registry = get_prometheus_registry()
        calibrated = self.rules.calibrated
        promised = None if calibrated is None else calibrated.chosen.agreement
        if self._exports and promised is not None:
            export_calibrated_agreement(registry, self._model_name, promised)
        if self._shadow_rate:
            depths = (*self.rules.exit_layers, self.rules.num_layers)
            counts = ShadowMetrics(registry, self._model_name, depths)
            ShadowEvaluation(
                self.engine, self.rules, self._shadow_rate, counts, self.take_traces
            ).start()

    async def _poll(self) -> None:
        while not self.engine.errored:
            await asyncio.sleep(POLL_SECONDS)
            # vLLM's worker polls its queue without sleeping for a second after each message, so
            # reading the counts of an idle server would keep a core busy. What other processes
            # serve is not known.
            if self._alone and not (self.open_requests or self.unsampled):
                continue
            self.unsampled = False
            await self.counts.refresh()

    async def take_traces(self, key: str) -> dict[str, Traced]:
        """Removes and returns the depths recorded under `key`; none if the worker is away.

        A finished answer is worth more than its depths.
        """
        try:
            return await self.worker.take_traces(key)
        except NoAnswerError:
            return {}

    def trace_of(self, request: Any, *, chat: bool) -> RequestTrace:
        """The trace of a request, under a new key, which the request takes."""
        key = uuid.uuid4().hex
        request.vllm_xargs["exit_trace"] = TraceKeys([key])
        keep_token_ids, request.return_token_ids = bool(request.return_token_ids), True
        return RequestTrace(
            lambda: self.take_traces(key),
            samples=request.n or 1,
            chat=chat,
            num_layers=self.rules.num_layers,
            keep_token_ids=keep_token_ids,
        )
