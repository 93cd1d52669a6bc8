"""vLLM's worker of a CPU, which drafts with the model's first layers; `--worker-cls` names it.

Importing vLLM's replaces PyTorch's CUDA events, streams and memory figures by stand-ins
(`vllm/v1/worker/cpu/shm.py`), so nothing that a GPU's server imports may import this.
"""

from vllm.v1.worker.cpu_worker import CPUWorker

from exitserve.engine.drafting.worker import DraftingWorker
from exitserve.engine.hooks.worker_extension import ExitWorkerExtension


class ExitWorker(DraftingWorker, CPUWorker, ExitWorkerExtension):
    """See `DraftingWorker`."""
