"""The state of a running server that its routes use."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from vllm.v1.metrics.prometheus import get_prometheus_registry

from exitserve.engine.hooks.rows_processor import RowsProcessor
from exitserve.engine.options import rules_from
from exitserve.server.metrics import (
    ExitMetrics,
    ShadowMetrics,
    export_calibrated_agreement,
)
from exitserve.server.response_fields import RequestTrace, Traced
from exitserve.server.shadow_evaluation import ShadowEvaluation
from exitserve.server.stats_window import StatsWindow
from exitserve.server.worker_client import LatestCounts, NoAnswerError, WorkerClient
from exitserve.trace_keys import TraceKeys

POLL_SECONDS = 2.0
"""How often counts are sampled while requests are served, for the sums of the last minute."""


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
        RowsProcessor.rules, RowsProcessor.serves_clients = self.rules, True
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
