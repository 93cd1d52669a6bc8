"""Everything that depends on vLLM's version (0.32): one place to look when it moves.

Read from `vllm/forward_context.py`, `vllm/v1/attention/backends/cpu_attn.py`,
`vllm/v1/worker/gpu_model_runner.py` and `vllm/v1/worker/gpu_input_batch.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.attention import unified_kv_cache_update

SUPPORTED_VLLM = "0.32"


def check_version() -> None:
    """Raises `RuntimeError` unless vLLM is of the minor version this release was built on."""
    from vllm import __version__

    if not __version__.startswith(f"{SUPPORTED_VLLM}."):
        raise RuntimeError(
            f"exitserve needs vLLM {SUPPORTED_VLLM}, found {__version__}; "
            f"install vllm=={SUPPORTED_VLLM}.0."
        )


@dataclass(frozen=True)
class BatchShape:
    """How the tokens of one forward pass belong to rows."""

    num_tokens: int
    """T, padding excluded."""
    row_ends: Tensor
    """[B] index after each row's last token."""


def batch_shape() -> BatchShape | None:
    """The batch in the current forward context; None in profiling and warm-up runs."""
    metadata = get_forward_context().attn_metadata
    if metadata is None:
        return None
    assert isinstance(metadata, dict), "micro-batching is refused at start-up"
    first: Any = next(iter(metadata.values()))  # each backend has a metadata class of its own
    return BatchShape(int(first.num_actual_tokens), first.query_start_loc[1:])


def write_kv(key: Tensor, value: Tensor, layer_name: str) -> None:
    """Writes keys and values [T, kv_heads, head_dim] of one layer into the paged cache."""
    unified_kv_cache_update(key, value, layer_name)


def request_ids(model_runner: Any) -> Callable[[], list[str]]:
    """Reads the internal request id of each batch row, in row order."""
    return lambda: list(model_runner.input_batch.req_ids)


def eos_token_ids(vllm_config: Any) -> Tensor:
    """[K] end-of-sequence ids from the model's config and generation config."""
    found: set[int] = set()
    generation = vllm_config.model_config.try_get_generation_config() or {}
    for value in (
        getattr(vllm_config.model_config.hf_config, "eos_token_id", None),
        generation.get("eos_token_id"),
    ):
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return torch.tensor(sorted(found), dtype=torch.long)


def refuse_unsupported(vllm_config: Any) -> None:
    """Raises `ValueError` at start-up for features that exits do not support yet."""
    parallel = vllm_config.parallel_config
    refusals = {
        "LoRA (--enable-lora)": vllm_config.lora_config is not None,
        "speculative decoding (--speculative-config)": vllm_config.speculative_config is not None,
        "quantised weights (--quantization)": vllm_config.quant_config is not None,
        "tensor parallelism (--tensor-parallel-size)": parallel.tensor_parallel_size > 1,
        "pipeline parallelism (--pipeline-parallel-size)": parallel.pipeline_parallel_size > 1,
        "micro-batching (--enable-dbo)": parallel.use_ubatching,
        "KV transfer (--kv-transfer-config)": vllm_config.kv_transfer_config is not None,
    }
    for feature, asked in refusals.items():
        if asked:
            raise ValueError(
                f"exitserve does not support {feature} together with early exit; "
                f"drop it, or serve this checkpoint with plain vLLM."
            )
