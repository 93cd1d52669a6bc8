"""The dispersion loss's log-sum-exp in Triton: tiles of cosines that live in registers.

In `_sums` each program has a tile of tokens and goes over the tiles of later tokens with a running
sum, so that each pair is computed once. `_coefficients` computes the tiles again in backward, a few
rows at a time. No atomics: the same input gives the same bits.

Shapes: B sequences, T tokens, D components.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from exitserve_kernels.ahead_of_time import Variant
from exitserve_kernels.dispersion.reference import MARGIN
from exitserve_kernels.in_triton import (
    add_scores,
    arccos,
    inner_products,
    sums_over_pairs,
    tile_of_rows,
)

BLOCK = 64
"""Rows and columns of a tile. With these sizes float32 products, which need the most registers,
spill on no target."""
LAUNCH: dict[str, int] = {"BLOCK": BLOCK, "BLOCK_D": 32, "num_warps": 8}
"""The same for both kernels, so that cosines have the same bits in backward as in forward."""


@triton.jit
def _cut(cosines, MARGIN: tl.constexpr):
    """Cosines clamped to [-1 + MARGIN, 1 - MARGIN]; NaN stays NaN."""
    cosines = tl.where(cosines > 1.0 - MARGIN, 1.0 - MARGIN, cosines)
    return tl.where(cosines < -1.0 + MARGIN, -1.0 + MARGIN, cosines)


@triton.jit
def _sums(
    units,
    mask,
    sums,
    tokens,
    width,
    batch_stride,
    stride,
    step,
    scale,
    MARGIN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tiles = tl.cdiv(tokens, BLOCK)
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    units += sequence * batch_stride
    mask += sequence * tokens
    first = tl.program_id(0) % tiles * BLOCK
    row = first + tl.arange(0, BLOCK)
    row_counts = tl.load(mask + row, mask=row < tokens, other=0) != 0
    top = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(first, tokens, BLOCK):
        column = start + tl.arange(0, BLOCK)
        column_counts = tl.load(mask + column, mask=column < tokens, other=0) != 0
        cosines = inner_products(units, row, column, tokens, width, stride, step, BLOCK_D)
        logits = arccos(_cut(cosines, MARGIN)) * scale
        chosen = row_counts[:, None] & column_counts[None, :] & (row[:, None] < column[None, :])
        logits = tl.where(chosen, logits, float("-inf"))
        top, total = add_scores(top, total, logits)
    # Without any pair: -inf + log 0 is -inf.
    tl.store(sums + sequence * tokens + row, top + tl.log(total), mask=row < tokens)


@triton.jit
def _coefficients(
    units,
    mask,
    sums,
    gradient,
    out,
    first,
    rows,
    tokens,
    width,
    batch_stride,
    stride,
    step,
    scale,
    MARGIN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    sequence, place, column = tile_of_rows(rows, tokens, BLOCK)
    # Rows beyond the last are tokens too, and are not stored.
    row = first + place
    units += sequence * batch_stride
    mask += sequence * tokens
    row_counts = tl.load(mask + row, mask=row < tokens, other=0) != 0
    column_counts = tl.load(mask + column, mask=column < tokens, other=0) != 0
    cosines = inner_products(units, row, column, tokens, width, stride, step, BLOCK_D)
    cut = _cut(cosines, MARGIN)
    share = tl.exp(arccos(cut) * scale - tl.load(sums + sequence))
    # A product of two factors: 1 - cos^2 has few digits left near 1.
    slope = -scale / tl.sqrt_rn((1.0 - cut) * (1.0 + cut))
    found = tl.load(gradient + sequence) * share * slope
    beyond = (cosines > 1.0 - MARGIN) | (cosines < -1.0 + MARGIN)
    chosen = row_counts[:, None] & column_counts[None, :] & (row[:, None] != column[None, :])
    found = tl.where(chosen & (beyond == 0), found, 0.0)
    out_at = out + (sequence * rows + place)[:, None] * tokens + column[None, :]
    tl.store(out_at, found, mask=(place < rows)[:, None] & (column < tokens)[None, :])


class _LogSum(torch.autograd.Function):
    """`reference.log_sum`; its gradient recomputes the tiles."""

    @staticmethod
    def forward(ctx: Any, units: Tensor, mask: Tensor, temperature: float) -> Tensor:
        sequences, tokens, width = units.shape
        sums = torch.empty(mask.shape, dtype=torch.float32, device=units.device)
        ctx.scale = -1.0 / (math.pi * temperature)
        _sums[(sequences * triton.cdiv(tokens, BLOCK),)](
            units,
            mask,
            sums,
            tokens,
            width,
            *units.stride(),
            ctx.scale,
            MARGIN=MARGIN,
            **LAUNCH,
        )
        # Over pairs i < j: the gradient is the same, and without the rounding of log 2.
        total = sums.logsumexp(1)
        ctx.save_for_backward(units, mask, total)
        return total + math.log(2.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        units, mask, total = ctx.saved_tensors
        gradient = gradient.contiguous()
        sequences, tokens, width = units.shape

        def coefficients(start: int, stop: int) -> Tensor:
            rows = stop - start
            out = total.new_empty((sequences, rows, tokens))
            _coefficients[(sequences * triton.cdiv(rows, BLOCK) * triton.cdiv(tokens, BLOCK),)](
                units,
                mask,
                total,
                gradient,
                out,
                start,
                rows,
                tokens,
                width,
                *units.stride(),
                ctx.scale,
                MARGIN=MARGIN,
                **LAUNCH,
            )
            return out

        return sums_over_pairs(coefficients, units, mask), None, None


def log_sum(units: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """`reference.log_sum`; at least one number in the vectors."""
    return _LogSum.apply(units, mask.contiguous(), temperature)


def _variant(name: str, kernel: Any, kind: str, *extra: str) -> Variant:
    sizes = ("tokens", "width", "batch_stride", "stride", *extra)
    pointers = ("sums", "gradient", "out") if extra else ("sums",)
    return Variant(
        f"dispersion {name}, {kind}",
        kernel,
        {
            "units": f"*{kind}",
            "mask": "*i1",
            **dict.fromkeys(pointers, "*fp32"),
            **dict.fromkeys(sizes, "i32:16"),
            "scale": "fp32",
        },
        {
            # Triton turns a stride of 1 into a constant.
            "step": 1,
            "MARGIN": MARGIN,
            "BLOCK": LAUNCH["BLOCK"],
            "BLOCK_D": LAUNCH["BLOCK_D"],
        },
        num_warps=LAUNCH["num_warps"],
    )


VARIANTS = [
    variant
    for kind in ("fp32", "bf16")
    for variant in (
        _variant("sums", _sums, kind),
        _variant("coefficients", _coefficients, kind, "first", "rows"),
    )
]
