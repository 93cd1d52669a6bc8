"""One engine in a process of its own, which does as it is told over a pipe.

The engine's own processes belong to the child's process group and end with it, whatever state
they are in; so the card's memory is free again for the next.
"""

from __future__ import annotations

import os
import re
import signal
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import if_nodes
from environment import PLUGIN
from shapes import Work, random_prompts
from stages import StageError, last_lines

from exitserve.bench.engines import BatchRequest, Engines
from exitserve.bench.forced import start_forced_engine
from exitserve.engine.launch import start_engine, start_plain_engine, stop_engine
from exitserve.settings import Setting

STOP_SECONDS = 20


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """What to start."""

    model_dir: Path
    exits: Mapping[str, Any] | None
    """Options of exitserve; None for plain vLLM."""
    forced: Mapping[str, float] | None
    """Shares of checks that pass and drafts that are accepted by lot; None: as they come."""
    llm: Mapping[str, Any]
    """Arguments of `vllm.LLM`."""
    vocab_size: int
    variables: Mapping[str, str] = field(default_factory=dict)
    """More of the environment."""


@dataclass(frozen=True, kw_only=True)
class Passed:
    """What one batch of B requests did, all started together."""

    tokens: tuple[tuple[int, ...], ...]
    """[B] generated ids of each request."""
    times: tuple[tuple[float, ...], ...]
    """[B] moment in seconds at which each of those ids arrived."""
    depths: list[tuple[int, ...]] | None = None
    """[B] layers run for each of them; None unless asked for, and of plain vLLM."""
    checks: int = 0
    """Reads of the LM head for exits: a check, or the logits of tokens that exit unchecked."""
    preemptions: int = 0
    """Since the engine's start, where it counts (`disable_log_stats=False`)."""


@dataclass(frozen=True, kw_only=True)
class EachOther(Setting):
    """Requests of several kinds beside each other."""

    kinds: tuple[dict[str, Any], ...]
    """The fields of one request after the other."""


class Child:
    """An engine in a process of its own. `ready` first, then `run`; `stop` in any case."""

    def __init__(self, spec: EngineSpec, log: Path) -> None:
        """Begins to start it.

        Args:
            spec: what to start.
            log: takes all that the engine says.
        """
        self._log = log
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, spec, log))
        self._process.start()
        theirs.close()

    def ready(self, seconds: float) -> dict[str, Any]:
        """Waits for the engine, and says how it runs; raises `StageError`."""
        found: dict[str, Any] = self._answer(seconds)
        return found | told(self._log)

    def run(self, setting: Setting, work: Work, seconds: float, *, traced: bool) -> Passed:
        """One batch; raises `StageError`."""
        self._pipe.send((setting, work, traced))
        found: Passed = self._answer(seconds)
        return found

    def _answer(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise StageError(f"no answer after {seconds:.0f} s. {last_lines(self._log)}")
        try:
            found = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise StageError(f"its process ended. {last_lines(self._log)}") from None
        if isinstance(found, _Failure):
            raise StageError(f"{found.what}. {last_lines(self._log)}")
        return found

    def ask_to_stop(self) -> None:
        """Lets it end by itself, so that several do so at a time."""
        with suppress(OSError):
            self._pipe.send(None)

    def stop(self) -> None:
        """Ends the engine and all its processes."""
        self.ask_to_stop()
        self._process.join(STOP_SECONDS)
        assert self._process.pid is not None, "started"
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # should it not lead its group yet
        self._process.join()


SAID = {
    "graph_gib": r"Graph capturing finished in \d+ secs, took ([\d.]+) GiB",
    "planned_graph_gib": r"Estimated CUDA graph memory: ([\d.]+) GiB total",
    "attention": r"Using (\w+) attention backend",
}
"""What vLLM says of itself in its log alone: the memory that graphs took, by what is free on the
card before and after, so with what cuBLAS and the allocator take for them; and what it planned."""


def told(log: Path) -> dict[str, Any]:
    """What an engine's log says of how it runs."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    found = {name: re.findall(pattern, text) for name, pattern in SAID.items()}
    said = {name: values[-1] for name, values in found.items() if values}
    return {k: float(v) if k.endswith("gib") else v for k, v in said.items()}


@dataclass(frozen=True)
class _Failure:
    what: str


def _serve(pipe: Connection, spec: EngineSpec, log: Path) -> None:
    """The child's life."""
    os.setsid()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(spec.variables)
    if spec.exits is not None and if_nodes.are_missing():
        if_nodes.install()
        # Naming plugins there turns the variable into an allow list, which exitserve extends.
        os.environ["VLLM_PLUGINS"] = PLUGIN
    engine = None
    try:
        engine, facts = _start(spec)
        pipe.send(facts)
        rivals = {"ngram": engine} if "speculative_config" in spec.llm else {}
        engines = Engines(engine, None, rivals=rivals)
        if spec.exits is not None:
            engines = Engines(None, engine, engine)
        while (order := pipe.recv()) is not None:
            pipe.send(_passed(engine, engines, spec, *order))
    except EOFError:  # the parent is gone
        pass
    except Exception as error:  # noqa: BLE001  # the parent decides what goes on
        traceback.print_exc()
        pipe.send(_Failure(f"{type(error).__name__}: {str(error)[:500]}"))
    finally:
        if engine is not None:
            stop_engine(engine)


def _start(spec: EngineSpec) -> tuple[Any, dict[str, Any]]:
    """The `vllm.LLM`, and how it runs."""
    started = time.perf_counter()
    if spec.exits is None:
        engine = start_plain_engine(spec.model_dir, **spec.llm)
    elif spec.forced is None:
        engine = start_engine(spec.model_dir, exits=spec.exits, **spec.llm)
    else:
        engine = start_forced_engine(spec.model_dir, spec.forced, exits=spec.exits, **spec.llm)
    config = engine.llm_engine.vllm_config
    compilation = config.compilation_config
    facts = {
        "start_seconds": round(time.perf_counter() - started, 1),
        "compilation": str(getattr(compilation.mode, "name", compilation.mode)),
        "graphs": str(getattr(compilation.cudagraph_mode, "name", compilation.cudagraph_mode)),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
    }
    if spec.exits is not None:
        facts["kernels"] = engine.collective_rpc("exit_kernels")[0]
    return engine, facts


def _preemptions(engine: Any) -> int:
    """Of a `vllm.LLM` since its start, if it was told to count."""
    counted = engine.get_metrics() if engine.llm_engine.log_stats else []
    return sum(int(one.value) for one in counted if one.name == "vllm:num_preemptions")


def _passed(
    engine: Any, engines: Engines, spec: EngineSpec, setting: Setting, work: Work, traced: bool
) -> Passed:
    prompts = random_prompts(spec.vocab_size, work.batch, work.prompt_tokens)
    kinds = setting.kinds if isinstance(setting, EachOther) else (setting.fields,)
    batch = [BatchRequest(tuple(ids), own) for ids, own in zip(prompts, cycle(kinds), strict=False)]
    if spec.exits is None or not traced:
        found = engines.run_batch(setting, batch, work.max_tokens, every=work.every)
        return Passed(tokens=found.tokens, times=found.times)
    before = engines.counts(setting)
    found = engines.run_batch(setting, batch, work.max_tokens, "gpu", every=work.every)
    return Passed(
        tokens=found.tokens,
        times=found.times,
        depths=engines.depths(setting, "gpu"),
        checks=engines.counts(setting)["checks"] - before["checks"],
        preemptions=_preemptions(engine),
    )
