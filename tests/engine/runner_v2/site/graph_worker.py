"""A worker on runner V2 whose graphs are recorded, for ranks, which are processes of their own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.worker.cpu_worker import CPUWorker

ROOT = Path(__file__).parents[4]


class GraphWorker(CPUWorker):
    """`worker_cls` of an engine names it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        sys.path.insert(0, str(ROOT))
        from tests.engine.runner_v2.graphs import let_capture

        self._graphs = let_capture(pytest.MonkeyPatch())
        super().__init__(*args, **kwargs)

    def graph_replays(self) -> int:
        """Of all graphs together."""
        return sum(one.replays for one in self._graphs)
