"""vLLM's executor of several processes, which on a CPU asks its workers once a step.

vLLM 0.32 asks them twice, to run the model and to sample, and a third time for drafts
(`step` and `post_step` in `vllm/v1/engine/core.py`). What the core does between the first two is
to make the mask of structured outputs, so the calls are one wherever no request has any. On GPUs
passes are scheduled ahead, which hides the calls; on a CPU each stands between two tokens.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from vllm import envs
from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class Step(Future[Any]):
    """One call of `ExitWorkerExtension.exit_step`, of which vLLM waits for the first part."""

    def __init__(self, call: Future[Any]) -> None:
        super().__init__()
        self._call = call

    def result(self, timeout: float | None = None) -> Any:
        """What the pass sampled: vLLM's `ModelRunnerOutput`."""
        return self._call.result(timeout)[0]

    @property
    def drafts(self) -> Any:
        """vLLM's `DraftTokenIds`, or None."""
        return self._call.result()[1]


class ExitExecutor(MultiprocExecutor):
    """Named by `--distributed-executor-backend`."""

    _step: Step | None = None
    """The last one, if it was one call."""

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Runs a step, sampling included, unless a mask or a connector needs it in parts."""
        self._step = None
        if scheduler_output.has_structured_output_requests or self._has_connectors:
            return super().execute_model(scheduler_output, non_block)
        self._step = Step(
            self.collective_rpc(
                "exit_step",
                args=(scheduler_output,),
                unique_reply_rank=self.output_rank,
                non_block=True,
                timeout=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS,
            )
        )
        return self._step if non_block else self._step.result()

    def take_draft_token_ids(self) -> Any:
        """The drafts behind the last step."""
        return super().take_draft_token_ids() if self._step is None else self._step.drafts

    @property
    def _has_connectors(self) -> bool:
        return self.kv_output_aggregator is not None or self.ec_output_aggregator is not None
