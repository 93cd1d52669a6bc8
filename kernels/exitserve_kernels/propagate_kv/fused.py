"""K/V propagation in Triton: a program for each row and layer, from projection to paged cache.

Shapes: N rows, S layers, H kv heads, P head size, R rotated part of it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from exitserve_kernels.in_triton import narrowed

TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}


@triton.jit
def _fill(
    projected,
    positions,
    slots,
    addresses,
    gains,
    tables,
    key_scales,
    value_scales,
    num_layers,
    slot_stride,
    row_stride,
    layer_stride,
    block_stride,
    place_stride,
    head_stride,
    step,
    gain_stride,
    epsilon,
    greatest,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    CACHE: tl.constexpr,
    TABLE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    slot = tl.load(slots + layer * slot_stride + row)
    if slot >= 0:
        head = tl.arange(0, BLOCK_H)[:, None]
        dim = tl.arange(0, BLOCK_P)[None, :]
        inside = (head < HEADS) & (dim < SIZE)
        source = projected + row * row_stride + layer * layer_stride
        at = head * SIZE + dim
        key = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(source + HEADS * SIZE + at, mask=inside, other=0.0).to(tl.float32)

        scale = tl.full([BLOCK_H, 1], 1.0, dtype=tl.float32)
        if NORM == 1:  # each head
            scale = 1.0 / tl.sqrt(tl.sum(key * key, axis=1)[:, None] / SIZE + epsilon)
        elif NORM == 2:  # all heads together
            whole = tl.sum(tl.sum(key * key, axis=1), axis=0)
            scale = scale / tl.sqrt(whole / (HEADS * SIZE) + epsilon)
        if NORM != 0:
            gain_at = gains + layer * gain_stride + (dim if NORM == 1 else at)
            key = key * scale * tl.load(gain_at, mask=inside, other=0.0).to(tl.float32)

        if ROTATED != 0:
            half = ROTATED // 2
            turned = dim < ROTATED
            if INTERLEAVED:
                partner, angle = dim ^ 1, dim // 2
                first = dim % 2 == 0
            else:
                first = dim < half
                partner, angle = tl.where(first, dim + half, dim - half), dim % half
            partner_in = inside & turned
            # The other element of each pair is read again, from the cache.
            other = tl.load(source + head * SIZE + partner, mask=partner_in, other=0.0)
            other = other.to(tl.float32)
            if NORM != 0:
                gain_at = gains + layer * gain_stride
                gain_at += partner if NORM == 1 else head * SIZE + partner
                gain = tl.load(gain_at, mask=partner_in, other=0.0).to(tl.float32)
                other = other * scale * gain
            table = tl.load(tables + layer).to(tl.pointer_type(TABLE))
            table += tl.load(positions + row) * ROTATED
            cos = tl.load(table + angle, mask=turned, other=1.0).to(tl.float32)
            sin = tl.load(table + half + angle, mask=turned, other=0.0).to(tl.float32)
            key = tl.where(turned, key * cos + tl.where(first, -other, other) * sin, key)

        if SCALED:
            scale_at = layer * HEADS + head
            key = key / tl.load(key_scales + scale_at, mask=head < HEADS, other=1.0)
            value = value / tl.load(value_scales + scale_at, mask=head < HEADS, other=1.0)
            # Keep NaN.
            key = tl.where(key == key, tl.minimum(tl.maximum(key, -greatest), greatest), key)
            value = tl.where(
                value == value, tl.minimum(tl.maximum(value, -greatest), greatest), value
            )
        to = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * place_stride
        to += head * head_stride + dim * step
        keys = tl.load(addresses + layer).to(tl.pointer_type(CACHE))
        values = tl.load(addresses + num_layers + layer).to(tl.pointer_type(CACHE))
        tl.store(keys + to, narrowed(key, CACHE), mask=inside)
        tl.store(values + to, narrowed(value, CACHE), mask=inside)


# The kernel reaches caches by their addresses. To a compiler it writes nothing that anyone reads,
# so it would be left out.
@torch.compiler.disable
def fill(
    projected: Tensor,
    positions: Tensor,
    slots: Tensor,
    caches: Any,
    key_norm: Any | None,
    rotary: Any | None,
) -> None:
    """See `propagate_kv.fill`; at least one row."""
    first: Tensor = caches.keys[0]
    _, block_size, heads, size = first.shape
    if projected.stride()[2:] != (heads * size, 1):
        projected = projected.contiguous()
    rows, layers = projected.shape[:2]
    norm, gains = 0, projected
    if key_norm is not None:
        gains = key_norm.gains.contiguous()
        norm = 1 if gains.shape[1] == size else 2
    scaled = caches.key_scales is not None
    _fill[(rows, layers)](
        projected,
        positions.contiguous(),
        slots.contiguous(),
        caches.addresses,
        gains,
        caches.addresses if rotary is None else rotary.addresses,
        caches.key_scales if scaled else projected,
        caches.value_scales if scaled else projected,
        layers,
        0 if slots.dim() == 1 else rows,
        projected.stride(0),
        projected.stride(1),
        *first.stride(),
        gains.stride(0) if norm else 0,
        key_norm.epsilon if key_norm is not None else 0.0,
        torch.finfo(first.dtype).max,
        BLOCK_SIZE=block_size,
        HEADS=heads,
        SIZE=size,
        ROTATED=0 if rotary is None else rotary.tables[0].shape[1],
        INTERLEAVED=rotary is not None and rotary.interleaved,
        NORM=norm,
        SCALED=scaled,
        CACHE=TYPES[first.dtype],
        TABLE=TYPES[first.dtype if rotary is None else rotary.tables[0].dtype],
        BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_P=triton.next_power_of_2(size),
        num_warps=4,
    )
