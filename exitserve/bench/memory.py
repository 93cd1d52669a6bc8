"""What each engine of a comparison needs in memory, and what it gets of a GPU's.

vLLM takes a share of the whole card for one engine (`gpu_memory_utilization`), and does not start
where less is free. The engines here run at the same time, so they get equal parts of that share.
"""

import math
from typing import Any

from exitserve.bench.settings import BenchJob
from exitserve.checkpoint.block import context_length_of, read_config
from exitserve.costs.byte_costs import DTYPE_BYTES, DecoderShape, serving_dtype, shape_of
from exitserve.errors import ExitServeError

BLOCK_TOKENS = 128
"""At least as large as vLLM's blocks on CPUs; a request's last block is rarely full."""
CONTEXT_BYTES = 600 * 2**20
"""Of CUDA's context in each engine's process, which vLLM counts among what others have taken."""
WORK_BYTES = 2 * 2**30
"""Of an engine beside weights and cache, on a GPU: activations of a pass, CUDA graphs."""


def cache_bytes(job: BenchJob) -> int:
    """Holds the largest batch of the longest requests.

    With less, vLLM would preempt requests and process their prompts again while others decode.
    It also refuses to start unless one request of the full context fits.
    """
    config, shape = _model_of(job)
    longest = max(map(len, job.prompts)) + job.max_tokens
    context = job.max_model_len or context_length_of(config) or 0
    blocks = max(
        # Drafts may need a block more; and one is spare: vLLM keeps a block for itself.
        max(job.batch_sizes) * (math.ceil(longest / BLOCK_TOKENS) + 1) + 1,
        math.ceil(context / BLOCK_TOKENS) + 1,
    )
    return blocks * BLOCK_TOKENS * shape.num_layers * shape.kv_token_bytes


def weight_bytes(job: BenchJob) -> int:
    """Of the model, in the type it is served in."""
    config, shape = _model_of(job)
    stored = sum(one.stat().st_size for one in job.model_dir.glob("*.safetensors"))
    if not stored:  # random weights
        matrices = 1 if config.get("tie_word_embeddings") else 2
        return shape.num_layers * shape.layer_bytes + matrices * shape.head_bytes
    declared = str(config.get("dtype", config.get("torch_dtype"))).removeprefix("torch.")
    return stored * shape.dtype_bytes // DTYPE_BYTES.get(declared, shape.dtype_bytes)


def share_of_gpu(job: BenchJob, engines: int, total: int) -> float:
    """What each of some engines gets of a GPU's `total` bytes, as vLLM's `gpu_memory_utilization`.

    Raises:
        ExitServeError: that is too little for weights and cache.
    """
    each = (job.gpu_memory_utilization * total - (engines - 1) * CONTEXT_BYTES) / engines
    weights, cache = weight_bytes(job), cache_bytes(job)
    if each < weights + cache + WORK_BYTES:
        gib = [f"{one / 2**30:.1f}" for one in (total, each, weights, cache, WORK_BYTES)]
        raise ExitServeError(
            f"{engines} engines share {job.gpu_memory_utilization:g} of the GPU's {gib[0]} GiB, "
            f"{gib[1]} GiB each; one needs {gib[2]} for weights, {gib[3]} for the key-value cache "
            f"and about {gib[4]} to work: leave out --rivals or --modes, lower --batch-sizes or "
            f"--max-model-len, or raise --gpu-memory-utilization."
        )
    return each / total


def _model_of(job: BenchJob) -> tuple[dict[str, Any], DecoderShape]:
    config = read_config(job.model_dir)
    return config, shape_of(config, serving_dtype(config, job.dtype))
