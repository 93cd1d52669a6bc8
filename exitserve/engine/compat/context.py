"""The forward pass as vLLM's attention sees it: rows, tokens, slots, and the same for some rows.

Read from `vllm/forward_context.py` and `vllm/v1/attention/backends/cpu_attn.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, TypeVar

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.forward_context import (
    ForwardContext,
    get_forward_context,
    override_forward_context,
)
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

_Given = TypeVar("_Given")

KEPT = 1024
"""Lengths of rows whose starts are kept as tensors."""


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
    """Whether `PassContexts` knows the attention backend of a pass."""
    metadata: Any = context.attn_metadata
    return all(isinstance(one, CPUAttentionMetadata) for one in _distinct(metadata))


def _distinct(metadata: dict[str, Any]) -> list[Any]:
    """The distinct metadata objects: layers of one cache group share theirs."""
    return list({id(one): one for one in metadata.values()}.values())


def cache_slots() -> list[list[int]]:
    """Where keys and values of the current pass go in the cache: [T] for each cache group."""
    slots: Any = get_forward_context().slot_mapping
    return [group.tolist() for group in _distinct(slots)]


def slots_ahead(starts: Mapping[int, int], count: int) -> dict[tuple[int, int], tuple[int, ...]]:
    """Where keys and values of tokens that are still to come go in the cache.

    Args:
        starts: by row of the current pass, the position of its next token.
        count: tokens of each, in consecutive positions.

    Returns:
        By row and position, the slots in G cache groups.
    """
    context = get_forward_context()
    metadata: Any = context.attn_metadata
    slots: Any = context.slot_mapping
    ahead = [(row, first + turn) for row, first in starts.items() for turn in range(count)]
    found = []
    for group in _distinct(slots):
        name = next(name for name, one in slots.items() if one is group)
        size, table = context.no_compile_layers[name].kv_cache.shape[2], metadata[name].block_table
        # Behind the end of the context nothing comes.
        last = table.shape[1] - 1
        wanted = torch.tensor([(row, min(position // size, last)) for row, position in ahead])
        blocks: list[int] = table[wanted[:, 0], wanted[:, 1]].tolist()
        found.append(
            [block * size + at % size for block, (_, at) in zip(blocks, ahead, strict=True)]
        )
    return dict(zip(ahead, zip(*found, strict=True), strict=True))


@dataclass(frozen=True)
class _Group:
    """Layers that share their attention metadata."""

    metadata: Any
    """Of the whole pass."""
    names: Sequence[str]
    attention: Any
    """The first of these layers."""
    window: int
    """Their sliding window, -1 where they differ."""
    slots: int
    """The number of their cache group."""


class PassContexts:
    """Contexts for some rows of a pass, with other tokens."""

    def __init__(self, base: ForwardContext) -> None:
        """Takes the context of the whole pass."""
        self.base = base
        self.arranged = _changed(base)
        """The context of the rows that run."""
        self._slots = _by_object(base.slot_mapping)
        by_name = {name: place for place, (_, names) in enumerate(self._slots) for name in names}
        self._groups = []
        for metadata, names in _by_object(base.attn_metadata):
            layers = [base.no_compile_layers[name] for name in names]
            windows = {layer.impl.sliding_window for layer in layers}
            window = windows.pop() if len(windows) == 1 else -1
            slots = by_name[names[0]]
            self._groups.append(_Group(metadata, names, layers[0], window, slots))

    def restart(self) -> None:
        """All rows of the pass run again, with its own tokens."""
        self.arranged.attn_metadata = self.base.attn_metadata
        self.arranged.slot_mapping = self.base.slot_mapping

    def arrange(
        self,
        rows: Sequence[int],
        lengths: Sequence[int],
        seq_lens: Sequence[int],
        slots: Sequence[Sequence[int]],
    ) -> None:
        """From now on some rows run.

        Args:
            rows: [R] the rows that run, ascending.
            lengths: [R] tokens of each; those of a row are the last of its sequence.
            seq_lens: [R] length of each row's sequence up to its last token.
            slots: G times [A] where keys and values of all those tokens go in the cache.
        """
        fresh = self._fresh(slots)
        changed: dict[str, Any] = {}
        for group in self._groups:
            metadata = _rearranged(group, rows, lengths, seq_lens, fresh[group.slots])
            changed |= dict.fromkeys(group.names, metadata)
        self.arranged.attn_metadata = changed
        self.arranged.slot_mapping = self._mapping(fresh)

    def with_slots(self, slots: Sequence[Sequence[int]]) -> ForwardContext:
        """One in which keys and values go to other slots, G times [A]; nothing attends in it."""
        return _changed(self.base, slot_mapping=self._mapping(self._fresh(slots)))

    def _fresh(self, slots: Sequence[Sequence[int]]) -> list[Tensor]:
        return [
            torch.tensor(new, dtype=one.dtype)
            for (one, _), new in zip(self._slots, slots, strict=True)
        ]

    def _mapping(self, slots: Sequence[Tensor]) -> dict[str, Tensor]:
        """By layer, where its keys and values go, from that of each cache group."""
        found: dict[str, Tensor] = {}
        for (_, names), own in zip(self._slots, slots, strict=True):
            found |= dict.fromkeys(names, own)
        return found


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


def _rearranged(
    group: _Group,
    rows: Sequence[int],
    lengths: Sequence[int],
    seq_lens: Sequence[int],
    slots: Tensor,
) -> Any:
    """The CPU backend's metadata for these rows; see `CPUAttentionMetadataBuilder.build`."""
    metadata, attention = group.metadata, group.attention
    table, starts = metadata.block_table, _starts(tuple(lengths))
    sequences = torch.tensor(seq_lens, dtype=torch.int32)
    return _changed(
        metadata,
        num_actual_tokens=slots.shape[0],
        max_query_len=max(lengths),
        query_start_loc=starts,
        max_seq_len=max(seq_lens),
        seq_lens=sequences,
        block_table=table if len(rows) == len(table) else table[torch.tensor(rows)],
        slot_mapping=slots,
        scheduler_metadata=ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(rows),
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_size,
            seq_lens=sequences,
            dtype=attention.kv_cache_torch_dtype,
            query_start_loc=starts,
            causal=metadata.causal,
            sliding_window_size=group.window,
            isa=attention.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            dynamic_causal=None,
            kv_cache_dtype=attention.kv_cache_dtype,
        ),
    )


def _changed(one: _Given, **fields: Any) -> _Given:
    """As `dataclasses.replace`, which runs `__init__`: that takes 5 us, for every turn."""
    found = object.__new__(type(one))
    found.__dict__.update(one.__dict__, **fields)
    return found


@lru_cache(KEPT)
def _starts(lengths: tuple[int, ...]) -> Tensor:
    """[R + 1] where rows of some lengths begin, and the last one ends."""
    return torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32)
