"""The forward pass as vLLM's attention sees it: rows, tokens, slots, and the same for some rows.

Read from `vllm/forward_context.py` and `vllm/v1/attention/backends/cpu_attn.py`.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata


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


def can_narrow(context: ForwardContext) -> bool:
    """Whether `narrow` knows the attention backend of a pass."""
    metadata: Any = context.attn_metadata
    return all(isinstance(one, CPUAttentionMetadata) for one in _distinct(metadata))


def _distinct(metadata: dict[str, Any]) -> list[Any]:
    """The distinct metadata objects: layers of one cache group share theirs."""
    return list({id(one): one for one in metadata.values()}.values())


def narrow(
    base: ForwardContext, rows: Sequence[int], lengths: Sequence[int], tokens: Tensor
) -> None:
    """Lets some rows of a pass run on alone, in the current forward context.

    Args:
        base: the context of the whole pass.
        rows: [R] those rows, ascending.
        lengths: [R] tokens of each.
        tokens: [A] all of these, as indices in the pass.
    """
    slots: dict[str, Tensor] = {}
    for own, names in _by_object(base.slot_mapping):
        slots |= dict.fromkeys(names, own[tokens])
    metadata: dict[str, Any] = {}
    for own, names in _by_object(base.attn_metadata):
        layers = [base.no_compile_layers[name] for name in names]
        found = _narrowed(own, layers, rows, lengths, slots[names[0]])
        metadata |= dict.fromkeys(names, found)
    context = get_forward_context()
    context.attn_metadata, context.slot_mapping = metadata, slots


def _by_object(by_layer: Any) -> list[tuple[Any, list[str]]]:
    """The distinct objects, each with the layers that share it."""
    names: dict[int, list[str]] = {}
    for name, one in by_layer.items():
        names.setdefault(id(one), []).append(name)
    return [(one, names[id(one)]) for one in _distinct(by_layer)]


def without_reading_for(
    frozen: Tensor, groups: Iterable[Iterable[Any]]
) -> AbstractContextManager[None]:
    """A forward context in which rows read no more than one key and value.

    The attention output of a frozen row is dropped, so reading its cache is wasted. Works for the
    FlashAttention and Triton backends, in passes of one token a row; others read all of it.

    FlashAttention 3 takes a schedule that was made ahead for the lengths of all rows; without one,
    every layer makes its own. So one is made here, for all layers that are to come. vLLM's builders
    do that between drafts, in graphs too, and write it to where the pass's own was: no layer may
    read that after this.

    Args:
        frozen: [T, 1] bool.
        groups: the runner's `attn_groups`, with the builders of the pass's metadata.
    """
    context = get_forward_context()
    metadata: Any = context.attn_metadata or {}
    known = all(
        hasattr(one, "scheduler_metadata")
        and not isinstance(one, CPUAttentionMetadata)
        and one.max_query_len == 1
        for one in metadata.values()
    )
    if not metadata or not known:
        return nullcontext()
    changed = {
        id(one): replace(
            one,
            # Padding has length 0, and keeps it: it has no blocks.
            seq_lens=torch.where(
                frozen[: len(one.seq_lens), 0], one.seq_lens.clamp(max=1), one.seq_lens
            ),
        )
        for one in _distinct(metadata)
    }
    for group in chain.from_iterable(groups):
        builder, one = group.get_metadata_builder(), metadata[group.layer_names[0]]
        if builder.supports_draft_decode_metadata_update:
            builder.update_draft_decode_metadata(changed[id(one)])
        else:  # a schedule for other lengths would not fit
            changed[id(one)].scheduler_metadata = None
    return override_forward_context(
        replace(context, attn_metadata={name: changed[id(one)] for name, one in metadata.items()})
    )


def _narrowed(
    metadata: Any, layers: Sequence[Any], rows: Sequence[int], lengths: Sequence[int], slots: Tensor
) -> Any:
    """The CPU backend's metadata for these rows; see `CPUAttentionMetadataBuilder.build`."""
    attention, kept = layers[0], torch.tensor(rows)
    windows = {layer.impl.sliding_window for layer in layers}
    sequences = metadata.seq_lens[kept]
    starts = torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32)
    return replace(
        metadata,
        num_actual_tokens=slots.shape[0],
        max_query_len=max(lengths),
        query_start_loc=starts,
        max_seq_len=int(sequences.max()),
        seq_lens=sequences,
        block_table=metadata.block_table[kept],
        slot_mapping=slots,
        scheduler_metadata=ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(rows),
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_size,
            seq_lens=sequences,
            dtype=attention.dtype,
            query_start_loc=starts,
            causal=metadata.causal,
            sliding_window_size=windows.pop() if len(windows) == 1 else -1,
            isa=attention.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            dynamic_causal=None,
            kv_cache_dtype=attention.kv_cache_dtype,
        ),
    )
