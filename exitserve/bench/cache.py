"""The size of the key-value cache that a comparison needs; on CPUs vLLM must be told."""

from __future__ import annotations

import math

from exitserve.bench.settings import BenchJob
from exitserve.checkpoint import read_config
from exitserve.costs import DTYPE_BYTES, shape_of

BLOCK_TOKENS = 128
"""At least as large as vLLM's blocks on CPUs; a request's last block is rarely full."""


def cache_gib(job: BenchJob) -> int:
    """Whole GiB (vLLM's unit) that hold the largest batch of the longest requests.

    With less, vLLM would preempt requests and process their prompts again while others decode.
    It also refuses to start unless one request of the full context fits.
    """
    config = read_config(job.model_dir)
    declared = config.get("dtype") or config.get("torch_dtype")
    dtype = declared if job.dtype == "auto" else job.dtype
    # Where the engine chooses the type, float32 is the largest that it may choose.
    shape = shape_of(config, dtype if dtype in DTYPE_BYTES else "float32")
    longest = max(map(len, job.prompts)) + job.max_tokens
    context = job.max_model_len or config.get("max_position_embeddings") or 0
    blocks = max(
        # One spare block: vLLM keeps a block for itself.
        max(job.batch_sizes) * math.ceil(longest / BLOCK_TOKENS) + 1,
        math.ceil(context / BLOCK_TOKENS) + 1,
    )
    needed = blocks * BLOCK_TOKENS * shape.num_layers * shape.kv_token_bytes
    return max(1, math.ceil(needed / 2**30))
