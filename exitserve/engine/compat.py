"""Everything that depends on vLLM's version (0.32): one place to look when it moves.

Read from `vllm/forward_context.py`, `vllm/v1/attention/backends/cpu_attn.py`,
`vllm/v1/worker/gpu_model_runner.py`, `vllm/v1/worker/gpu_input_batch.py` and
`vllm/v1/worker/utils.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm import _custom_ops as ops
from vllm import envs
from vllm.forward_context import ForwardContext, get_forward_context
from vllm.model_executor.layers.attention.attention import unified_kv_cache_update
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.triton_utils.dispatcher import register_kernels
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

from exitserve.engine.active import Active
from exitserve.engine.options import PROPOSER, QUANTISED

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


def can_rearrange(context: ForwardContext) -> bool:
    """Whether `rearranged_context` knows the attention backend of a pass."""
    metadata: Any = context.attn_metadata
    return all(isinstance(one, CPUAttentionMetadata) for one in _distinct(metadata))


def _distinct(metadata: dict[str, Any]) -> list[Any]:
    """The distinct metadata objects: layers of one cache group share theirs."""
    return list({id(one): one for one in metadata.values()}.values())


def cache_slots() -> tuple[Tensor, ...]:
    """Where keys and values of the current pass go in the cache: [T] for each cache group."""
    slots: Any = get_forward_context().slot_mapping
    return tuple(_distinct(slots))


def slots_at(rows: Sequence[int], positions: Tensor) -> tuple[Tensor, ...]:
    """Where keys and values go in the cache: G times [N].

    Args:
        rows: [N] rows of the current pass.
        positions: [N] in their sequences.
    """
    context = get_forward_context()
    metadata: Any = context.attn_metadata
    slots: Any = context.slot_mapping
    found = []
    for group in _distinct(slots):
        name = next(name for name, one in slots.items() if one is group)
        size = context.no_compile_layers[name].kv_cache.shape[2]
        blocks = metadata[name].block_table[torch.tensor(rows), positions // size]
        found.append(blocks.to(group.dtype) * size + positions % size)
    return tuple(found)


def rearranged_context(base: ForwardContext, active: Active) -> ForwardContext:
    """The context of a pass for some of its rows, with other tokens.

    Args:
        base: the context of the whole pass.
        active: the tokens that run, those of a row the last of its sequence.
    """
    rows, lengths, slots, seq_lens = active.rows, active.lengths, active.slots, active.ends()
    metadata: Any = base.attn_metadata
    old: Any = base.slot_mapping
    fresh = {id(one): new for one, new in zip(_distinct(old), slots, strict=True)}
    layers: dict[int, list[str]] = {}
    for name, one in metadata.items():
        layers.setdefault(id(one), []).append(name)
    chosen, counts = torch.tensor(rows), torch.tensor(lengths, dtype=torch.int32)
    changed = {
        id(one): _rearranged(
            one,
            chosen,
            counts,
            seq_lens,
            fresh[id(old[layers[id(one)][0]])],
            [base.no_compile_layers[name] for name in layers[id(one)]],
        )
        for one in _distinct(metadata)
    }
    return replace(
        base,
        attn_metadata={name: changed[id(one)] for name, one in metadata.items()},
        slot_mapping={name: fresh[id(one)] for name, one in old.items()},
    )


def _rearranged(
    metadata: Any,
    rows: Tensor,
    lengths: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    layers: list[Any],
) -> Any:
    """The CPU backend's metadata for these rows; see `CPUAttentionMetadataBuilder.build`."""
    starts = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    windows = {layer.impl.sliding_window for layer in layers}
    first = layers[0]
    return replace(
        metadata,
        num_actual_tokens=slots.shape[0],
        max_query_len=int(lengths.max()),
        query_start_loc=starts,
        max_seq_len=int(seq_lens.max()),
        seq_lens=seq_lens,
        block_table=metadata.block_table[rows],
        slot_mapping=slots,
        scheduler_metadata=ops.cpu_attn_get_scheduler_metadata(
            num_reqs=rows.shape[0],
            num_heads=first.num_heads,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_size,
            seq_lens=seq_lens,
            dtype=first.kv_cache_torch_dtype,
            query_start_loc=starts,
            causal=metadata.causal,
            sliding_window_size=windows.pop() if len(windows) == 1 else -1,
            isa=first.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            dynamic_causal=None,
            kv_cache_dtype=first.kv_cache_dtype,
        ),
    )


class CacheWriter:
    """Writes keys and values of several layers into the paged cache."""

    def __init__(self, attentions: Sequence[Any]) -> None:
        self._attentions = list(attentions)
        self._names = [attention.layer_name for attention in attentions]
        self._together: Tensor | None = None
        self._offsets: Tensor | None = None
        """[S] where each layer begins in the joint cache, in slots; None until looked at."""

    def write(self, keys: Tensor, values: Tensor, tokens: Tensor | None) -> None:
        """Writes one position of each row.

        Args:
            keys: [N, S, H, P] for S layers.
            values: [N, S, H, P].
            tokens: [N] indices in the forward pass, None for all of it.
        """
        if self._offsets is None:  # caches are bound after the model's first passes
            self._together, self._offsets = _one_cache(self._attentions)
        slots: Any = get_forward_context().slot_mapping
        first: Tensor = slots[self._names[0]]
        if self._together is None or any(slots[name] is not first for name in self._names):
            self._write_each(keys, values, tokens, slots)
            return
        own = first if tokens is None else first[tokens]
        attention = self._attentions[0]
        attention.impl.do_kv_cache_update(
            attention,
            keys.flatten(0, 1),
            values.flatten(0, 1),
            self._together,
            (own[:, None] + self._offsets).flatten(),
        )

    def _write_each(
        self, keys: Tensor, values: Tensor, tokens: Tensor | None, slots: dict[str, Tensor]
    ) -> None:
        for index, attention in enumerate(self._attentions):
            key, value = keys[:, index].contiguous(), values[:, index].contiguous()
            if tokens is None:
                unified_kv_cache_update(key, value, attention.layer_name)
                continue
            attention.impl.do_kv_cache_update(
                attention, key, value, attention.kv_cache, slots[attention.layer_name][tokens]
            )


def _one_cache(attentions: Sequence[Any]) -> tuple[Tensor | None, Tensor]:
    """One view of the caches of consecutive layers, if they lie in a row in memory.

    On the CPU a layer's cache is [blocks, heads, block size, 2 * head size], and the caches of a
    group's layers follow each other in one allocation, so that S layers of n blocks are one
    cache of S * n blocks.

    Returns:
        The view, None where caches lie otherwise; and the slot [S] at which each layer begins.
    """
    first = attentions[0]
    none = None, torch.empty(0, dtype=torch.long)
    if first.attn_backend.get_name() != "CPU_ATTN" or first.kv_cache_dtype not in ("auto", None):
        return none
    caches: list[Tensor] = [attention.kv_cache for attention in attentions]
    size = caches[0].numel() * caches[0].element_size()
    in_a_row = all(
        cache.is_contiguous()
        and cache.shape == caches[0].shape
        and cache.untyped_storage().data_ptr() == caches[0].untyped_storage().data_ptr()
        and cache.data_ptr() == caches[0].data_ptr() + index * size
        for index, cache in enumerate(caches)
    )
    if not in_a_row:
        return none
    blocks, _, block_size, _ = caches[0].shape
    view = caches[0].as_strided((len(caches) * blocks, *caches[0].shape[1:]), caches[0].stride())
    return view, torch.arange(len(caches)) * (blocks * block_size)


def packed_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """A linear map [N, D] to [N, K] with `weight` [K, D], packed as vLLM packs its own."""
    if not current_platform.is_cpu():
        return lambda x: functional.linear(x, weight, bias)
    holder: Any = nn.Module()
    holder.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    holder.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    dispatch_cpu_unquantized_gemm(holder, remove_weight=True)
    return lambda x: holder.cpu_linear(x, holder.weight, holder.bias)


def request_ids(model_runner: Any) -> Callable[[], list[str]]:
    """Reads the internal request id of each batch row, in row order."""
    return lambda: list(model_runner.input_batch.req_ids)


def watch_rows(model_runner: Any, processor: Any) -> None:
    """Lets `processor` follow the batch of an engine with speculative decoding.

    Also lets drafts be asked for up to the end of the context: else vLLM sends every row of the
    batch drafts of zeros (`_input_fits_in_drafter`) once one of its rows comes near.
    """
    processors = model_runner.input_batch.logitsprocs.argmax_invariant
    if not any(type(one) is type(processor) for one in processors):
        processors.append(processor)
    model_runner.effective_drafter_max_model_len = model_runner.max_model_len + (
        model_runner.num_spec_tokens
    )


def repair_sampling_with_drafts() -> None:
    """Lets requests that sample, and whose drafts are judged, have their own temperature on a CPU.

    vLLM 0.32 spreads a request's temperature, top-k and top-p over its drafts by a kernel whose
    CPU version (`vllm/utils/cpu_triton_utils.py`, `_expand_kernel_impl`) writes into a converted
    copy of its output unless that is of 64-bit integers: all three are then whatever lay in
    memory, and samples follow another distribution. vLLM's registry takes a better one.
    """
    if current_platform.is_cpu() and not HAS_TRITON:
        register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": _expand})


def _expand(
    output: Tensor,
    values: Tensor,
    ends: Tensor,
    replace_from: float,
    replace_to: float,
    _most: int | None = None,
) -> None:
    """Repeats each of `values` [B] for the tokens that end before `ends` [B], into `output` [T]."""
    values = torch.where(values == replace_from, replace_to, values).to(output.dtype)
    output.copy_(values.repeat_interleave(ends.diff(prepend=ends.new_zeros(1))))


def living_requests(model_runner: Any) -> Callable[[str], bool]:
    """Tells whether a request, by its internal id, has not ended; preempted ones have not."""
    return lambda request_id: request_id in model_runner.requests


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


def cached_block(vllm_config: Any) -> int | None:
    """Tokens of a block of the prefix cache; None without one."""
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching:
        return None
    return int(cache.prefix_match_unit or cache.block_size)


def refuse_unsupported(vllm_config: Any) -> None:
    """Raises `ValueError` at start-up for features that exits do not support yet."""
    parallel = vllm_config.parallel_config
    speculation = getattr(vllm_config.speculative_config, "model", None)
    scheme = "none" if vllm_config.quant_config is None else vllm_config.quant_config.get_name()
    refusals = {
        "LoRA (--enable-lora)": vllm_config.lora_config is not None,
        "speculative decoding (--speculative-config)": speculation not in (None, PROPOSER),
        f"{scheme} weights (supported: {', '.join(QUANTISED)})": scheme not in ("none", *QUANTISED),
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
