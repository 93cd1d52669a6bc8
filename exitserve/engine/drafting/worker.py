"""A worker whose runner drafts with the model's first layers.

vLLM's configuration asks for a draft model, which reserves the cache slots and schedules the
drafts; what the runner makes for one is replaced before anything is loaded, so there never is a
second model.

vLLM gives its worker class the extension as a base, once, and refuses it to a class that has its
methods from elsewhere: from vLLM's own worker, if another engine of this process gave it to that.
So `exitserve.engine.hooks.gpu_worker` and `cpu_worker` each name it as a base themselves.
"""

from typing import Any


class DraftingWorker:
    """Put it before one of vLLM's workers."""

    vllm_config: Any
    device: Any
    model_runner: Any
    use_v2_model_runner: bool

    def init_device(self) -> None:
        """Makes the runner, which has loaded nothing yet."""
        make: Any = super().init_device  # type: ignore[misc]  # of the worker behind this
        if not self.use_v2_model_runner:
            from exitserve.engine.compat.runner import runner_class
            from exitserve.engine.drafting.cpu import DraftingRunner

            with runner_class(DraftingRunner):
                make()
            return
        from exitserve.engine.drafting.gpu import FirstLayersSpeculator

        make()
        runner = self.model_runner
        runner.speculator = FirstLayersSpeculator(self.vllm_config, self.device, runner.req_states)
