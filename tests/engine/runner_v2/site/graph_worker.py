"""Workers on runner V2 whose graphs are recorded, where they are processes of their own."""

import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.worker.cpu_worker import CPUWorker

from exitserve.engine.drafting.worker import DraftingWorker
from exitserve.engine.hooks.worker_extension import ExitWorkerExtension

ROOT = Path(__file__).parents[4]


class GraphWorker(CPUWorker):
    """`worker_cls` of an engine names it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        sys.path.insert(0, str(ROOT))
        from tests.engine.runner_v2.graphs import capture_pieces, let_capture

        patch = pytest.MonkeyPatch()
        self._graphs = let_capture(patch)
        capture_pieces(patch)  # if any is compiled
        super().__init__(*args, **kwargs)

    def graph_replays(self) -> int:
        """Of all graphs together."""
        return sum(one.replays for one in self._graphs)

    def graphs_replayed(self) -> int:
        """How many of them, at least once."""
        return sum(one.replays > 0 for one in self._graphs)


class DraftingWorker(DraftingWorker, GraphWorker, ExitWorkerExtension):
    """The same for an engine that drafts."""
