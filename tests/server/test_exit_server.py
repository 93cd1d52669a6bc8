"""Waits for the worker end, whatever becomes of the engine; counts are told meanwhile.

The engine here is a stand-in: that real ones die is tested in `tests/e2e/test_ends_of_a_server.py`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from exitserve.engine.recorder import Recorder
from exitserve.policy import ExitRules
from exitserve.server import routes
from exitserve.server.engine_end import EngineEnd
from exitserve.server.exit_server import ExitServer, LatestCounts
from exitserve.server.metrics import WorkerMetrics
from exitserve.server.response_fields import NoAnswerError, WorkerClient
from exitserve.server.stats_window import StatsWindow

MODEL = "tiny"
SOON = 0.02
RULES = ExitRules(num_layers=6, exit_layers=(2, 4))


class Engine:
    """Answers when it is let to, in the order of the calls; what it counts grows."""

    engine_ranks_managed = (0,)

    def __init__(self) -> None:
        self.engine_core = self  # vLLM's client of the core processes
        self.errored = False
        self.refusal: Exception | None = None
        self.recorder = Recorder(6, (2, 4))
        self.answering = asyncio.Event()
        self.answering.set()
        self.calls = 0
        self.stopped = 0

    async def call_utility_all_async(self, utility: str, method: str, *rest: Any) -> list[Any]:
        self.calls += 1
        if self.refusal is not None:
            raise self.refusal
        snapshot = self.recorder.snapshot()
        await self.answering.wait()
        return [[{"exit_stats": snapshot, "exit_take_traces": {"r": {0: [6, ""]}}}.get(method)]]

    def shutdown(self, timeout: float | None = None) -> None:
        self.stopped += 1
        self.errored = True


def run(test: Callable[[Engine], Awaitable[None]]) -> None:
    async def with_an_engine() -> None:
        await test(Engine())

    asyncio.run(with_an_engine())


def counts_of(engine: Engine, **options: Any) -> tuple[LatestCounts, CollectorRegistry]:
    registry = CollectorRegistry()
    worker = WorkerClient(engine, **options)
    return LatestCounts(worker, WorkerMetrics(registry, MODEL), StatsWindow()), registry


def tokens(registry: CollectorRegistry) -> float:
    labels = {"model_name": MODEL, "engine": "0", "exit_layer": "6"}
    return registry.get_sample_value("exitserve_tokens_total", labels) or 0.0


def test_an_engine_that_fails_ends_every_wait() -> None:
    async def test(engine: Engine) -> None:
        engine.answering.clear()
        waits = [asyncio.ensure_future(WorkerClient(engine).counts()) for _ in range(3)]
        await asyncio.sleep(SOON)
        engine.errored = True
        began = time.monotonic()
        ended = await asyncio.gather(*waits, return_exceptions=True)
        assert time.monotonic() - began < 2
        assert {type(one) for one in ended} == {NoAnswerError}

    run(test)


def test_an_engine_that_hangs_is_waited_for_so_long_and_no_longer() -> None:
    async def test(engine: Engine) -> None:
        engine.answering.clear()
        began = time.monotonic()
        with pytest.raises(NoAnswerError, match="does not answer"):
            await WorkerClient(engine, answer_seconds=0.1).counts()
        assert 0.1 <= time.monotonic() - began < 2

    run(test)


def test_nothing_is_left_waiting() -> None:
    """Not even where who waited has gone away."""

    async def test(engine: Engine) -> None:
        engine.answering.clear()
        wait = asyncio.ensure_future(WorkerClient(engine).counts())
        await asyncio.sleep(SOON)
        wait.cancel()
        await asyncio.sleep(SOON)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(test)


def test_a_busy_engine_is_asked_once_and_the_last_counts_are_shown() -> None:
    async def test(engine: Engine) -> None:
        counts, registry = counts_of(engine)
        engine.recorder.tokens_by_depth[6] += 1
        await counts.refresh()
        engine.answering.clear()
        for _ in range(10):
            engine.recorder.tokens_by_depth[6] += 1
            began = time.monotonic()
            await asyncio.gather(*(counts.refresh(SOON) for _ in range(4)))
            assert time.monotonic() - began < 1
        assert engine.calls == 2
        assert tokens(registry) == counts.report()["since_start"]["tokens"] == 1
        assert counts.report()["age_seconds"] >= 10 * SOON
        engine.answering.set()
        await counts.refresh()  # what was asked long ago
        await counts.refresh()
        assert tokens(registry) == counts.report()["since_start"]["tokens"] == 11

    run(test)


# A token is counted, somebody looks (with little patience), one of the calls is answered, or time
# passes, after which nobody waits for calls that were made before.
EVENTS = st.lists(
    st.sampled_from(["token", "token", "look", "look", "oldest", "newest", "time"]), max_size=16
)


class SlowEngine(Engine):
    """Answers each call when told to, with the counts as they were when it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[asyncio.Future[None]] = []

    async def call_utility_all_async(self, utility: str, method: str, *rest: Any) -> list[Any]:
        snapshot = self.recorder.snapshot()
        self.open.append(asyncio.get_running_loop().create_future())
        await self.open[-1]
        return [[snapshot]]

    async def answer(self, place: int) -> None:
        if self.open and not (call := self.open.pop(place)).done():
            call.set_result(None)
        await asyncio.sleep(0.001)


@settings(max_examples=60)
@given(EVENTS)
def test_counts_reach_the_metrics_once_and_in_order(events: list[str]) -> None:
    """Whoever looked when, whatever was given up or answered late."""

    async def test() -> None:
        engine = SlowEngine()
        counts, registry = counts_of(engine, answer_seconds=0.03)
        total, seen = 0, 0.0
        for event in events:
            match event:
                case "token":
                    engine.recorder.tokens_by_depth[6] += 1
                    total += 1
                case "look":
                    await counts.refresh(0.001)
                case "oldest":
                    await engine.answer(0)
                case "newest":
                    await engine.answer(-1)
                case "time":
                    await asyncio.sleep(0.04)
            assert seen <= tokens(registry) <= total
            seen = tokens(registry)
        counts._worker._answer_seconds = 60
        for _ in range(2):  # the first may be of long ago
            look = asyncio.ensure_future(counts.refresh())
            await asyncio.sleep(0)
            while not look.done():
                await engine.answer(-1)
        assert counts.report()["since_start"]["tokens"] == tokens(registry) == total

    asyncio.run(test())


@pytest.fixture
def server() -> Any:
    """The routes' state, without start-up."""

    def make(engine: Engine) -> ExitServer:
        made: Any = object.__new__(ExitServer)
        made.engine, made.worker, made.chats = engine, WorkerClient(engine), False
        made.counts, _ = counts_of(engine)
        return made

    return make


def test_a_trace_that_cannot_be_had_is_empty() -> None:
    async def test(engine: Engine) -> None:
        worker = WorkerClient(engine)
        assert await worker.take_traces("k") == {"r": {0: [6, ""]}}
        engine.refusal = Exception("Server shutting down")
        assert await worker.take_traces("k") == {}

    run(test)


@pytest.mark.parametrize("path", ["/metrics", "/exitserve/stats"])
def test_pages_of_counts_answer_within_a_second(path: str, server: Any) -> None:
    """While a step takes ten seconds, and when the engine is dead."""
    import httpx
    from fastapi import FastAPI

    async def test(engine: Engine) -> None:
        app = FastAPI()
        app.add_middleware(routes.Traffic)
        app.get("/exitserve/stats")(routes.stats)
        app.get("/metrics")(lambda: "the page")
        app.state.exitserve = made = server(engine)
        made.open_requests, made.unsampled = 0, False
        made.rules = RULES
        engine.answering.clear()
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")
        for dead in (False, True):
            engine.errored = dead
            began = time.monotonic()
            assert (await client.get(path)).status_code == 200
            assert time.monotonic() - began < 1

    run(test)


@pytest.mark.parametrize("dies_first", [True, False])
def test_an_engine_that_ends_before_its_server_has_failed(server: Any, dies_first: bool) -> None:
    async def test(engine: Engine) -> None:
        made, end = server(engine), EngineEnd()
        listener = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1")
        http = SimpleNamespace(servers=[listener])
        end.watch(engine, SimpleNamespace(exitserve=made, server=http))
        engine.errored = dies_first
        stopping = asyncio.create_task(asyncio.to_thread(engine.shutdown, timeout=0))
        await asyncio.sleep(0.2)  # what is inside the door reaches the engine first
        assert bool(engine.stopped) == dies_first
        await stopping
        engine.shutdown(timeout=0)  # vLLM's, at the end of the server
        assert end.failed == dies_first
        assert engine.stopped == 2
        await asyncio.sleep(0)
        assert made.stops and not listener.is_serving()

    run(test)
