"""Features of vLLM that `exitserve serve` does not support; rejected before anything loads.

`exitserve.engine.compat` rejects engine features again when the model is built, because an engine
may also be started from Python.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from exitserve.checkpoint.block import BLOCK
from exitserve.checkpoint.first_layers import COUNTS
from exitserve.engine.launch import runs_on_v2
from exitserve.engine.options import FIXED_SCALES, QUANTISED, has_fixed_activation_scales
from exitserve.errors import ExitServeError
from exitserve.policy import ExitRules

PLAIN = "serve this checkpoint with `vllm serve`"
READ_FROM_CONFIG = frozenset((BLOCK, *COUNTS))
"""Keys of `config.json` that the command checks before vLLM reads them."""


@dataclass(frozen=True)
class UnsupportedFeature:
    """A feature of vLLM that cannot be served with exits."""

    name: str
    is_requested: Callable[[Any], Any]
    """Whether vLLM's parsed arguments request it."""
    reason: str
    fix: str = f"drop it, or {PLAIN}"
    needs_exits: bool = True
    """Whether only models with exit layers lack it."""
    drafts_have_it: bool = False
    """Whether servers have it whose first layers draft (GPUs): all passes are vLLM's own there."""

    @property
    def message(self) -> str:
        """The error message."""
        return f"{self.name} is not supported: {self.reason}. To go on, {self.fix}."


BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"


def _may_break_graphs(args: Any) -> bool:
    """Whether vLLM would capture breakable graphs, as far as it can be told without its config:
    with VLLM_BATCH_INVARIANT=1 it does for some models on some GPUs."""
    if args.enforce_eager or not runs_on_v2():
        return False
    if BREAKABLE in os.environ:
        return os.environ[BREAKABLE] == "1"
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") != "0"


def transfers_kv(args: Any) -> bool:
    """Whether vLLM's parsed arguments ask for a KV connector."""
    return bool(args.kv_transfer_config or args.kv_offloading_size)


UNSUPPORTED_FEATURES: tuple[UnsupportedFeature, ...] = (
    UnsupportedFeature(
        "LoRA (--enable-lora)",
        lambda args: args.enable_lora or args.lora_modules,
        "the keys and values of the layers that an exited token skips come from the base weights, "
        "without the adapter",
        fix="give one adapter for all requests as --adapter DIR, or drop the flag",
    ),
    UnsupportedFeature(
        "speculative decoding (--speculative-config)",
        lambda args: args.speculative_config or args.spec_method or args.spec_model,
        "exits make drafts themselves (--mode verify), and two kinds of drafts cannot be combined",
    ),
    UnsupportedFeature(
        "pipeline parallelism (--pipeline-parallel-size above 1)",
        lambda args: args.pipeline_parallel_size > 1,
        "a token that exits would still have to visit the stages that hold the layers it skips, "
        "and only the last stage has the head that checks it",
        fix=f"use --tensor-parallel-size, or {PLAIN}",
        needs_exits=False,
    ),
    UnsupportedFeature(
        "context parallelism (--decode-context-parallel-size, --prefill-context-parallel-size)",
        lambda args: (
            args.decode_context_parallel_size > 1 or args.prefill_context_parallel_size > 1
        ),
        "the keys and values of exited tokens are written to one unsharded cache",
        fix="use 1",
    ),
    UnsupportedFeature(
        "micro-batching (--enable-dbo, --ubatch-size)",
        lambda args: args.enable_dbo or args.ubatch_size > 1,
        "exits are planned for the whole batch, which micro-batching splits",
    ),
    UnsupportedFeature(
        "new weights in a running server (--weight-transfer-config)",
        lambda args: args.weight_transfer_config,
        "exits keep copies of the old ones",
    ),
    UnsupportedFeature(
        "sampling by ranks (--enable-batch-sharded-sampling)",
        lambda args: args.enable_batch_sharded_sampling,
        "exits are planned for the whole batch, which ranks would share out",
    ),
    UnsupportedFeature(
        "KV transfer (--kv-transfer-config, --kv-offloading-size) on a GPU",
        lambda args: transfers_kv(args) and runs_on_v2(),
        "it was not tested with exits there",
    ),
    UnsupportedFeature(
        "this kind of quantised weights (--quantization)",
        lambda args: (
            args.quantization_config
            or (args.quantization is not None and args.quantization not in QUANTISED)
        ),
        f"exits were tested with {', '.join(QUANTISED)} only",
        fix=f"use the unquantised checkpoint, or {PLAIN}",
        drafts_have_it=True,
    ),
    UnsupportedFeature(
        f"breakable graphs ({BREAKABLE}=1, which VLLM_BATCH_INVARIANT=1 may set)",
        _may_break_graphs,
        "they break at attention, which lies inside the branches of a pass",
        fix=f"set {BREAKABLE}=0",
        drafts_have_it=True,
    ),
    UnsupportedFeature(
        "another model implementation (--model-impl)",
        lambda args: args.model_impl not in ("auto", "vllm"),
        "only exitserve's own model classes support exits",
    ),
    UnsupportedFeature(
        "pooling, embeddings, scores and classification (--runner, --convert, --task)",
        lambda args: (
            args.runner not in ("auto", "generate") or args.convert not in ("auto", "none")
        ),
        "exits are for generated tokens, and these tasks generate none",
        needs_exits=False,
    ),
    UnsupportedFeature(
        "servers that vLLM starts for each rank (--data-parallel-multi-port-external-lb)",
        lambda args: args.data_parallel_multi_port_external_lb,
        "vLLM would start servers without exits",
        fix="start one server for each replica behind a load balancer",
        needs_exits=False,
    ),
    UnsupportedFeature(
        "engines that come and go (--enable-elastic-ep)",
        lambda args: args.enable_elastic_ep,
        "counts and traces are read from the engines that a server starts with",
        fix="start one server for each replica behind a load balancer",
        needs_exits=False,
    ),
    UnsupportedFeature(
        "--api-server-count below 1",
        lambda args: args.api_server_count is not None and args.api_server_count < 1,
        "nobody would answer",
        fix="start engines of a server on another machine with --headless",
        needs_exits=False,
    ),
    UnsupportedFeature(
        "Ray (--data-parallel-backend ray, --distributed-executor-backend ray)",
        lambda args: "ray" in (args.data_parallel_backend, args.distributed_executor_backend),
        "vLLM has no Ray for CPUs, where exits are tested",
        fix="leave it out: engines and ranks on other machines start with --headless",
        needs_exits=False,
    ),
    UnsupportedFeature(
        "serving without HTTP (--grpc)",
        lambda args: args.grpc,
        "exit fields need the HTTP server",
        needs_exits=False,
    ),
)


def reject_unsupported(vllm_args: Any, *, has_exits: bool, drafts: bool) -> None:
    """Raises `ExitServeError` for the first unsupported feature that is requested.

    Args:
        vllm_args: vLLM's parsed arguments.
        has_exits: the model has exit layers; without any, only features that the server itself
            does not support are rejected.
        drafts: the first layers draft, on a GPU.
    """
    for feature in UNSUPPORTED_FEATURES:
        lacks = (has_exits or not feature.needs_exits) and not (drafts and feature.drafts_have_it)
        if lacks and feature.is_requested(vllm_args):
            raise ExitServeError(feature.message)


def check_same_config(vllm_args: Any) -> None:
    """Raises `ExitServeError` if vLLM would read other exits than the command has checked."""
    overrides = vllm_args.hf_overrides
    fixed = sorted(READ_FROM_CONFIG & set(overrides)) if isinstance(overrides, Mapping) else []
    reasons = {
        "--hf-config-path": vllm_args.hf_config_path is not None,
        f"--hf-overrides of {', '.join(fixed)}": bool(fixed),
    }
    for flag, given in reasons.items():
        if given:
            raise ExitServeError(
                f"{flag} is not supported: exits are read from the config.json of MODEL, at the "
                f"--revision of the command line. Change them there, or {PLAIN}."
            )


def reject_unsupported_quantisation(config: Mapping[str, Any]) -> None:
    """Raises `ExitServeError` for a checkpoint whose quantisation is untested, or cannot run
    on this CPU."""
    quantised = config.get("quantization_config")
    if not quantised:
        return
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
    if method not in QUANTISED:
        raise ExitServeError(
            f"weights quantised by {method!r} (in the checkpoint's config.json) are not supported: "
            f"exits were tested with {', '.join(QUANTISED)} only. "
            f"To go on, use the unquantised checkpoint, or {PLAIN}."
        )
    from exitserve.engine.compat.config import lacks_kernel

    if lacks_kernel(method):
        raise ExitServeError(
            f"weights quantised by {method!r} (in the checkpoint's config.json) cannot be served "
            f"here: vLLM has no kernel for 4 bits on a CPU without AVX-512. "
            f"To go on, use the unquantised checkpoint, or a machine with AVX-512."
        )
    if has_fixed_activation_scales(quantised):
        raise ExitServeError(
            f"{FIXED_SCALES} (input_activations without dynamic in the checkpoint's config.json) "
            f"are not supported: keys and values of skipped layers would be rounded. "
            f"To go on, use a checkpoint with dynamic scales, or {PLAIN}."
        )


def reject_parallel_experts(config: Mapping[str, Any], vllm_args: Any) -> None:
    """Raises `ExitServeError` for data parallelism of a mixture of experts."""
    if config.get("num_experts_per_tok") and vllm_args.data_parallel_size > 1:
        raise ExitServeError(
            "data parallelism of a mixture of experts (--data-parallel-size) is not supported: its "
            "ranks exchange tokens in every layer, so that all of them have to run all layers. To "
            f"go on, start one server for each replica behind a load balancer, or {PLAIN}."
        )


def check_shadow_rate(rate: float, rules: ExitRules, vllm_args: Any) -> None:
    """Raises `ExitServeError` unless the server can compare that share of its requests."""
    if not 0.0 <= rate <= 1.0:
        raise ExitServeError(
            f"--shadow-rate must be a share from 0 (off) to 1 (every request), not {rate}; "
            "for one request in a hundred write 0.01."
        )
    if rate == 0.0:
        return
    reasons = {
        "this model has no exit layers, so nothing exits": not rules.exit_layers,
        "--mode verify already verifies every token at full depth": rules.default.mode == "verify",
        "servers that draft on a GPU, as in mode defer, do not support it": (
            rules.num_drafts > 0 and runs_on_v2()
        ),
        "it needs log-probabilities, which --max-logprobs 0 forbids": vllm_args.max_logprobs == 0,
        "it compares raw logits, which --logprobs-mode "
        f"{vllm_args.logprobs_mode} hides": not vllm_args.logprobs_mode.startswith("raw"),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ExitServeError(f"--shadow-rate is not possible here: {reason}. Drop it.")


NO_POOLING = (
    "this server only generates text: models with exits produce no embeddings, scores or classes. "
    "Use /v1/completions or /v1/chat/completions here, and an embedding model for this route."
)
"""The error of `POOLING_ROUTES`."""

POOLING_ROUTES = (
    "/classify",
    "/pooling",
    "/rerank",
    "/score",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v2/embed",
    "/v2/rerank",
)
"""vLLM's routes of pooling models; without ours they would be 404s."""

NO_SCALING = (
    "this server keeps the engines that it started with. Start one server for each replica behind "
    "a load balancer."
)
"""The error of `SCALING_ROUTE`."""
SCALING_ROUTE = "/scale_elastic_ep"
"""vLLM's route that changes the number of its engines; without ours it would answer 500."""
