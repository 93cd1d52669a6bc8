"""Engines for tests: in the test's process, and shared by all tests that ask for the same.

A process of its own would import torch and vLLM again, half a minute for each engine; here a start
takes a few seconds. Only what needs processes or a compiler gets them: see `needs_processes`.
"""

from __future__ import annotations

import gc
import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

CACHE_BYTES = 128 << 20  # 16 rows of the bundled model's longest context fit
ALIVE = 3
"""Engines that are kept: a test uses two at most, beside one that its module shares."""
USUAL = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 16}

DEFAULTS = {"exit_rows": "frequent"}
"""Of our options: an engine that is told them is one that is not."""


def launch(model: Path | str, options: Mapping[str, Any], *, plain: bool = False) -> Any:
    """Starts an engine whose core, and if it can whose worker too, runs in this process."""
    import torch
    from vllm import envs
    from vllm.model_executor.models import registry

    from exitserve.engine.launch import start_engine, start_plain_engine

    start = start_plain_engine if plain else start_engine
    chosen = {**USUAL, **options}
    if not plain:
        chosen["exits"] = DEFAULTS | (options.get("exits") or {})
    if needs_processes(model, options):
        chosen["distributed_executor_backend"] = "mp"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        # VLLM_CPU_KVCACHE_SPACE counts whole GiB, and a start writes zeros to all of them.
        patch.setattr("vllm.platforms.cpu.GiB_bytes", CACHE_BYTES)
        # vLLM replaces this one for good.
        patch.setattr(torch, "set_num_threads", torch.set_num_threads)
        # vLLM asks a new process, which imports all of it, what a model class is.
        patch.setattr(registry._LazyRegisteredModel, "inspect_model_cls", _inspect)
        # A start collects garbage seven times: what is here already is none.
        gc.freeze()
        # That a size is given, though the patch above sets it, leaves out a warm-up.
        engine = start(model, kv_cache_memory_bytes=CACHE_BYTES, **chosen)
    # A start makes vLLM remember the environment as it is; the next test may change it.
    envs.disable_envs_cache()
    return engine


def _inspect(registered: Any) -> Any:
    from vllm.model_executor.models import registry

    return registry._ModelInfo.from_model_cls(registered.load_model_cls())


def end(engine: Any, *, last: bool) -> None:
    """Ends an engine; the last in this process takes the process groups along, which all share."""
    from vllm.v1.engine import core

    with pytest.MonkeyPatch.context() as patch:
        if not last:
            patch.setattr(core, "cleanup_dist_env_and_memory", lambda: None)
        engine.llm_engine.engine_core.shutdown()


def needs_processes(model: Path | str, options: Mapping[str, Any]) -> bool:
    """Ranks and named executors are processes, and compiled code binds what a process holds once.

    OLMo 2 runs on vLLM's Transformers backend, which puts layers of vLLM's into Hugging Face's
    module: in this process, the oracle of a later test could not be built.
    """
    several = "distributed_executor_backend" in options
    several = several or options.get("tensor_parallel_size", 1) > 1
    replaces = '"olmo2"' in (Path(model) / "config.json").read_text()
    return several or not options.get("enforce_eager", True) or replaces


class Pool:
    """Engines in this process, by model and options; the one that rested longest ends first."""

    def __init__(self) -> None:
        self._alive: OrderedDict[str, tuple[Any, Any]] = OrderedDict()

    def engine(self, model: Path | str, options: Mapping[str, Any], *, plain: bool = False) -> Any:
        """An engine without requests, with an empty prefix cache."""
        from exitserve.engine.request import FieldCheck

        chosen = USUAL | options | {"exits": DEFAULTS | (options.get("exits") or {})}
        key = json.dumps([str(model), plain, chosen], sort_keys=True, default=str)
        if key in self._alive and self._alive[key][0].llm_engine.has_unfinished_requests():
            self._end(key)  # a test that failed left them
        if key not in self._alive:
            self.make_way(options)
            if "experts" in (Path(model) / "config.json").read_text():
                self.close()  # process groups have one of experts only if the first engine has
            self._end(*list(self._alive)[: -ALIVE + 1])
            self._alive[key] = (launch(model, options, plain=plain), FieldCheck.rules)
        self._alive.move_to_end(key)
        engine, FieldCheck.rules = self._alive[key]
        engine.reset_prefix_cache()
        return engine

    def make_way(self, options: Mapping[str, Any]) -> None:
        """vLLM's counters are the process's: those of a new engine take the place of others'."""
        if "disable_log_stats" in options:
            self._end(*(key for key in self._alive if "disable_log_stats" in key))

    def close(self) -> None:
        """Ends all engines, and what they share."""
        self._end(*self._alive)

    def __len__(self) -> int:
        return len(self._alive)

    def _end(self, *keys: str) -> None:
        for key in keys:
            engine, _ = self._alive.pop(key)
            end(engine, last=not self._alive)
        if keys:
            gc.collect()


POOL = Pool()
