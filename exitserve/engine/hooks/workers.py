"""vLLM's workers, whose runner V2 drafts with the model's first layers (`exitserve.engine.rails`).

`--worker-cls` names one. vLLM's configuration asks for a draft model, which reserves the cache
slots and schedules the drafts; the speculator that it makes for one is replaced before anything
is loaded, so there never is a second model.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from exitserve.engine.hooks.worker_extension import ExitWorkerExtension
from exitserve.engine.rails.speculator import FirstLayersSpeculator


class _Drafts:
    """A worker whose model drafts for itself; put it before one of vLLM's."""

    vllm_config: Any
    device: Any
    model_runner: Any

    def init_device(self) -> None:
        """Makes the runner, which has loaded nothing yet."""
        super().init_device()  # type: ignore[misc]  # of the worker behind this
        self.model_runner.speculator = FirstLayersSpeculator(self.vllm_config, self.device)


# vLLM gives its worker class the extension as a base, once, and refuses it to a class that has its
# methods from elsewhere: from vLLM's own worker, if another engine of this process gave it to that.


class ExitWorker(_Drafts, Worker, ExitWorkerExtension):
    """vLLM's worker of a GPU."""


class ExitCPUWorker(_Drafts, CPUWorker, ExitWorkerExtension):
    """vLLM's worker of a CPU, where a Triton for CPUs lets runner V2 run (in tests)."""
