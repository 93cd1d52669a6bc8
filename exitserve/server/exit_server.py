"""A running server as our routes use it, and the counts that it reads from its engines' workers."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

from vllm.v1.metrics.prometheus import get_prometheus_registry

from exitserve.engine.options import rules_from
from exitserve.engine.request import FieldCheck
from exitserve.server.metrics import ShadowMetrics, WorkerMetrics, export_calibrated_agreement
from exitserve.server.response_fields import NoAnswerError, WorkerClient
from exitserve.server.shadow_evaluation import ShadowEvaluation
from exitserve.server.stats_window import StatsWindow

POLL_SECONDS = 2.0
"""How often counts are sampled while requests are served, for the sums of the last minute."""
PATIENCE_SECONDS = 0.8
"""How long a page of counts waits for new ones before it shows the last."""


class LatestCounts:
    """The workers' counts, read when somebody looks, and the last ones while one is busy.

    One reading is under way at a time, and all who look share it. So readings arrive in the order
    in which they were taken: an older one on top of a newer would pass for a restart of the worker
    (`exitserve.server.metrics.advance`).
    """

    def __init__(
        self, worker: WorkerClient, metrics: WorkerMetrics | None, window: StatsWindow
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
        metrics = WorkerMetrics(get_prometheus_registry(), model_name) if self._exports else None
        self.counts = LatestCounts(self.worker, metrics, StatsWindow())
        self.stops = False
        """Whether it finishes what runs, and takes no more."""
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
                self.engine, self.rules, self._shadow_rate, counts, self.worker.take_traces
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
