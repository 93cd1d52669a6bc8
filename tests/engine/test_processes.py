"""What vLLM's processes are given."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

import pytest
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.multiproc_executor import WorkerProc

from exitserve.engine.compat.processes import ROOM, make_room
from exitserve.engine.hooks.plugin import register

CALLS = 500


def most_page_faults(depths: int = 300) -> int:
    """Of many calls of one function, made from each of so many depths of frames."""

    def function() -> None: ...

    def count() -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for _ in range(CALLS):
            function()
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    def at(depth: int) -> int:
        return at(depth - 1) if depth else count()

    return max(at(depth) for depth in range(depths))


def test_no_call_below_a_loop_maps_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    def loop(_self: object = None) -> None:
        found.append(most_page_faults())

    monkeypatch.setattr(EngineCoreProc, "run_busy_loop", loop)
    loop()
    make_room()
    loop()
    without, roomy = found
    assert roomy < CALLS / 10
    if sys.version_info < (3, 13):  # later ones may keep a chunk for the next call
        assert without >= CALLS  # at one depth every call maps a page


def test_every_process_has_room() -> None:
    register()
    loops: tuple[Callable[..., None], ...] = (
        EngineCoreProc.run_busy_loop,
        WorkerProc.worker_busy_loop,
    )
    assert {loop.__code__.co_stacksize for loop in loops} == {ROOM}
