"""What the API process may ask of the worker, through vLLM's `collective_rpc`."""

from __future__ import annotations

from typing import Any

import torch

from exitserve.engine.compat.config import check_version
from exitserve.engine.compat.runner import living_requests, request_ids, watch_rows
from exitserve.engine.compat.seeds import seed_keeper
from exitserve.engine.hooks.rows_processor import RowsProcessor
from exitserve.engine.host.rows import rows_of
from exitserve_kernels.dispatch import chosen


class ExitWorkerExtension:
    """Mixed into vLLM's worker by `worker_extension_cls`."""

    vllm_config: Any
    model_runner: Any

    def exit_attach(self) -> None:
        """Lets the rows see vLLM's batch; called once, after start-up."""
        check_version()
        rows = rows_of(self.vllm_config)
        if self.vllm_config.use_v2_model_runner:
            return
        rows.request_ids = request_ids(self.model_runner)
        rows.is_alive = living_requests(self.model_runner)
        rows.before_pass = seed_keeper(self.model_runner)
        if rows.rules.num_drafts:
            watch_rows(
                self.model_runner, RowsProcessor(self.vllm_config, torch.device("cpu"), False)
            )

    def exit_stats(self) -> dict[str, Any]:
        """Counts since start, and the tokens that wait now."""
        rows = rows_of(self.vllm_config)
        rows.recorder.pending_tokens = rows.num_pending()
        if rows.resident is not None:
            rows.resident.read_counts()
        return rows.recorder.snapshot()

    def exit_kernels(self) -> dict[str, str]:
        """The form, triton or torch, in which each operation runs; see `dispatch.chosen`."""
        return dict(chosen())

    def exit_take_traces(self, key: str) -> dict[str, dict[int, int]]:
        """See `Recorder.take_traces`."""
        rows = rows_of(self.vllm_config)
        if rows.resident is not None:
            rows.resident.drain(wait=True)
        return rows.recorder.take_traces(key)
