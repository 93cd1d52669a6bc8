"""What the API process asks of the worker, with an end to every wait.

vLLM answers between two steps of its engine. A step may take seconds, and an engine that hangs or
has died never answers: a request that waited for it would not end, and the server waits for its
requests before it stops.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

from exitserve.server.full_trace import Notes
from exitserve.server.metrics import ExitMetrics, Snapshot
from exitserve.server.response_fields import Depths
from exitserve.server.stats_window import StatsWindow

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 30.0
"""The longest wait for an answer: long enough for a step with long prompts on a CPU."""
FAILURE_SECONDS = 0.25
"""How soon a failure of the engine ends a wait."""
PATIENCE_SECONDS = 0.8
"""How long a page of counts waits for new ones before it shows the last."""


class NoAnswerError(RuntimeError):
    """The worker gave no answer: its engine failed, is stopping, or takes too long."""


class WorkerClient:
    """Calls of `exitserve.engine.hooks.worker_extension.ExitWorkerExtension`."""

    def __init__(self, engine_client: Any, *, answer_seconds: float = ANSWER_SECONDS) -> None:
        """Asks nothing yet.

        Args:
            engine_client: vLLM's.
            answer_seconds: the longest wait for an answer.
        """
        self._engine = engine_client
        self._answer_seconds = answer_seconds

    async def attach(self) -> None:
        """Tells the worker that vLLM's engine is complete; to be called once."""
        await self._ask("exit_attach")

    async def counts(self) -> Snapshot:
        """The counts since the worker's start."""
        counts: Snapshot = await self._ask("exit_stats")
        return counts

    async def take_traces(self, key: str) -> dict[str, Depths]:
        """Removes and returns the depths that the worker recorded under `key`."""
        traces: dict[str, Depths] = await self._ask("exit_take_traces", key)
        return traces

    async def take_notes(self, key: str) -> dict[str, Notes]:
        """Removes and returns what the worker noted under `key`, after `take_traces`."""
        notes: dict[str, Notes] = await self._ask("exit_take_notes", key)
        return notes

    async def _ask(self, method: str, *args: Any) -> Any:
        """The first rank's answer.

        Raises:
            NoAnswerError: there is none.
        """
        # One that comes later finds nobody waiting for it: vLLM drops it.
        call = asyncio.ensure_future(self._engine.collective_rpc(method, args=args))
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
            return call.result()[0]
        except NoAnswerError:
            raise
        except Exception as error:  # vLLM's refusals, as of a server that stops, have no type
            raise NoAnswerError(f"the engine cannot be asked: {error}") from error
        finally:
            call.cancel()


class LatestCounts:
    """The worker's counts, read when somebody looks, and the last ones while it is busy.

    One reading is under way at a time, and all who look share it. So readings arrive in the order
    in which they were taken: an older one on top of a newer would pass for a restart of the worker
    (`exitserve.server.metrics.advance`).
    """

    def __init__(self, worker: WorkerClient, metrics: ExitMetrics, window: StatsWindow) -> None:
        """Knows no counts before the first reading.

        Args:
            worker: is asked.
            metrics: are raised to each reading.
            window: gets each reading.
        """
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
        self._metrics.update(counts)
        self._window.add(self._read_at, counts)

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
