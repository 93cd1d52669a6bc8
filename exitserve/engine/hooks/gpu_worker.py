"""vLLM's worker of a GPU, which drafts with the model's first layers; `--worker-cls` names it."""

from vllm.v1.worker.gpu_worker import Worker

from exitserve.engine.drafting.worker import DraftingWorker
from exitserve.engine.hooks.worker_extension import ExitWorkerExtension


class ExitWorker(DraftingWorker, Worker, ExitWorkerExtension):
    """See `DraftingWorker`."""
