"""The paged caches of several layers at once, as each attention backend keeps them.

Read from `vllm/v1/attention/backends/{cpu_attn,flash_attn,triton_attn}.py`.

Shapes: N rows, S layers, H kv heads, P head size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform

from exitserve_kernels.dispatch import choose
from exitserve_kernels.propagate_kv import Caches, KVStore

PAGED = ("FLASH_ATTN", "TRITON_ATTN")
"""Backends whose cache is [blocks, H, block size, 2 * P], keys first."""
EIGHT_BITS = {"fp8": None, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def layer_caches(attentions: Sequence[Any]) -> KVStore:
    """Where keys and values of these layers go: by our kernel where it knows the cache.

    Args:
        attentions: [S] vLLM's `Attention` layers, whose caches are bound.
    """
    kinds = {(one.kv_cache.shape, one.kv_cache.stride(), one.kv_cache_dtype) for one in attentions}
    first = attentions[0]
    known = first.attn_backend.get_name() in PAGED and (
        first.kv_cache.is_floating_point() or first.kv_cache_dtype in EIGHT_BITS
    )
    if known and len(kinds) == 1 and choose("propagate_kv", first.kv_cache.device) == "triton":
        return paged_caches(attentions)
    choose("propagate_kv", first.kv_cache.device, "torch")  # for people: which form runs
    return CacheWriter(attentions)


def paged_caches(attentions: Sequence[Any]) -> Caches:
    """Views of caches [blocks, H, block size, 2 * P] for our kernel."""
    views, scales = [], []
    for one in attentions:
        cache = one.kv_cache
        if one.kv_cache_dtype in EIGHT_BITS:
            cache = cache.view(EIGHT_BITS[one.kv_cache_dtype] or current_platform.fp8_dtype())
            # Of the whole layer, or of each head (compressed-tensors' strategy "attn_head").
            own = [
                scale.flatten().expand(one.num_kv_heads) for scale in (one._k_scale, one._v_scale)
            ]
            scales.append(torch.stack(own).float())
        views.append(cache.transpose(1, 2).split(one.head_size, dim=-1))
    keys, values = zip(*views, strict=True)
    if not scales:
        return Caches(keys, values)
    of_keys, of_values = torch.stack(scales, dim=1).contiguous()
    return Caches(keys, values, of_keys, of_values)


def layer_slots(attentions: Sequence[Any], tokens: Tensor | None) -> Tensor:
    """Where the current pass puts keys and values: [N], or [S, N] where layers differ.

    Args:
        attentions: [S] layers.
        tokens: [N] indices in the forward pass, None for all of it.
    """
    known: Any = get_forward_context().slot_mapping
    slots = [known[one.layer_name] for one in attentions]
    if all(one is slots[0] for one in slots):
        return slots[0] if tokens is None else slots[0][tokens]  # type: ignore[no-any-return]
    together = torch.stack(slots)
    return together if tokens is None else together[:, tokens]


class CacheWriter:
    """Writes through vLLM, whatever the backend; in one call where caches lie in a row."""

    def __init__(self, attentions: Sequence[Any]) -> None:
        """Takes vLLM's `Attention` layers [S], whose caches are bound."""
        self._attentions = list(attentions)
        self.layers = len(self._attentions)
        self.heads: int = attentions[0].num_kv_heads
        self.head_size: int = attentions[0].head_size
        self._together, self._offsets = _one_cache(self._attentions)

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """See `KVStore`; vLLM writes nothing at a negative slot either."""
        keys = keys.to(values.dtype)  # computed in float32
        if self._together is None:
            for index, attention in enumerate(self._attentions):
                attention.impl.do_kv_cache_update(
                    attention,
                    keys[:, index].contiguous(),
                    values[:, index].contiguous(),
                    attention.kv_cache,
                    slots if slots.dim() == 1 else slots[index],
                )
            return
        own = slots[:, None] if slots.dim() == 1 else slots.T
        places = (own + self._offsets).masked_fill_(own < 0, -1)
        attention = self._attentions[0]
        attention.impl.do_kv_cache_update(
            attention, keys.flatten(0, 1), values.flatten(0, 1), self._together, places.flatten()
        )


def _one_cache(attentions: Sequence[Any]) -> tuple[Tensor | None, Tensor]:
    """One view of the caches of consecutive layers, if they lie in a row in memory.

    On the CPU a layer's cache is [blocks, heads, block size, 2 * head size], and the caches of a
    group's layers follow each other in one allocation, so that S layers of n blocks are one
    cache of S * n blocks.

    Returns:
        The view, None where caches lie otherwise; and the slot [S] at which each layer begins in
        it.
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
