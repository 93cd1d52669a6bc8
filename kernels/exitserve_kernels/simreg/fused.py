"""SimReg's log-sum-exps in Triton: tiles of similarities that live in registers.

In `_sums` each program has a tile of tokens and goes over all tiles of their sequence with a
running maximum and a running sum. `_coefficients` computes the tiles again in backward, a few rows
at a time. No atomics: the same input gives the same bits.

Shapes: B sequences, T tokens, D components.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from exitserve_kernels.ahead_of_time import Variant
from exitserve_kernels.in_triton import add_scores, inner_products, sums_over_pairs, tile_of_rows

BLOCK = 64
"""Rows and columns of a tile. With these sizes float32 products, which need the most registers,
spill on no target."""
BLOCK_D = 16
"""The same for both kernels, so that scores have the same bits in backward as in forward. With
other rounding a token's shares exp(s - log sum) would not sum to 1, and at temperature 0.05 the
gradient's error would be 2.5 times as large."""
SUMS_WARPS = 4
COEFFICIENTS_WARPS = 8


@triton.jit
def _sums(
    vectors,
    labels,
    negatives,
    positives,
    tokens,
    width,
    batch_stride,
    stride,
    step,
    temperature,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tiles = tl.cdiv(tokens, BLOCK)
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    vectors += sequence * batch_stride
    labels += sequence * tokens
    row = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    of_row = tl.load(labels + row, mask=row < tokens, other=-1)
    top_other = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    top_same = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    sum_other = tl.zeros([BLOCK], dtype=tl.float32)
    sum_same = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, tokens, BLOCK):
        column = start + tl.arange(0, BLOCK)
        of_column = tl.load(labels + column, mask=column < tokens, other=-1)
        scores = inner_products(vectors, row, column, tokens, width, stride, step, BLOCK_D)
        scores = scores / temperature
        both = (of_row >= 0)[:, None] & (of_column >= 0)[None, :]
        same = of_row[:, None] == of_column[None, :]
        other = tl.where(both & (same == 0), scores, float("-inf"))
        top_other, sum_other = add_scores(top_other, sum_other, other)
        alike = tl.where(both & same, scores, float("-inf"))
        top_same, sum_same = add_scores(top_same, sum_same, alike)
    at = sequence * tokens + row
    # Without any pair: -inf + log 0 is -inf.
    tl.store(negatives + at, top_other + tl.log(sum_other), mask=row < tokens)
    tl.store(positives + at, top_same + tl.log(sum_same), mask=row < tokens)


@triton.jit
def _of_kind(same, negatives, positives, at, inside):
    """For each pair of a token, its number for positive or for negative pairs."""
    negative = tl.load(negatives + at, mask=inside, other=0.0)
    return tl.where(same, tl.load(positives + at, mask=inside, other=0.0), negative)


@triton.jit
def _coefficients(
    vectors,
    labels,
    negatives,
    positives,
    of_negatives,
    of_positives,
    out,
    first,
    rows,
    tokens,
    width,
    batch_stride,
    stride,
    step,
    temperature,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    sequence, place, column = tile_of_rows(rows, tokens, BLOCK)
    # Rows beyond the last are tokens too, and are not stored.
    row = first + place
    vectors += sequence * batch_stride
    row_at = sequence * tokens + row
    column_at = sequence * tokens + column
    of_row = tl.load(labels + row_at, mask=row < tokens, other=-1)
    of_column = tl.load(labels + column_at, mask=column < tokens, other=-1)
    scores = inner_products(vectors, row, column, tokens, width, stride, step, BLOCK_D)
    scores = scores / temperature
    same = of_row[:, None] == of_column[None, :]

    # The pair's share as (i, j) and as (j, i).
    at, inside = row_at[:, None], (row < tokens)[:, None]
    total = _of_kind(same, negatives, positives, at, inside)
    found = _of_kind(same, of_negatives, of_positives, at, inside) * tl.exp(scores - total)
    at, inside = column_at[None, :], (column < tokens)[None, :]
    total = _of_kind(same, negatives, positives, at, inside)
    found += _of_kind(same, of_negatives, of_positives, at, inside) * tl.exp(scores - total)
    # Masked last: sums of tokens that do not count are -inf, and their gradients may be NaN.
    both = (of_row >= 0)[:, None] & (of_column >= 0)[None, :]
    found = tl.where(both, found / temperature, 0.0)
    out_at = out + (sequence * rows + place)[:, None] * tokens + column[None, :]
    tl.store(out_at, found, mask=(place < rows)[:, None] & (column < tokens)[None, :])


class _LogSums(torch.autograd.Function):
    """`reference.log_sums`; its gradient recomputes the tiles."""

    @staticmethod
    def forward(
        ctx: Any, vectors: Tensor, labels: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        sequences, tokens, width = vectors.shape
        negatives = torch.empty(labels.shape, dtype=torch.float32, device=vectors.device)
        positives = torch.empty_like(negatives)
        _sums[(sequences * triton.cdiv(tokens, BLOCK),)](
            vectors,
            labels,
            negatives,
            positives,
            tokens,
            width,
            *vectors.stride(),
            temperature,
            BLOCK=BLOCK,
            BLOCK_D=BLOCK_D,
            num_warps=SUMS_WARPS,
        )
        ctx.save_for_backward(vectors, labels, negatives, positives)
        ctx.temperature = temperature
        return negatives, positives

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_negatives: Tensor, of_positives: Tensor) -> tuple[Tensor, None, None]:
        vectors, labels, negatives, positives = ctx.saved_tensors
        of_negatives, of_positives = of_negatives.contiguous(), of_positives.contiguous()
        sequences, tokens, width = vectors.shape

        def coefficients(start: int, stop: int) -> Tensor:
            rows = stop - start
            out = negatives.new_empty((sequences, rows, tokens))
            _coefficients[(sequences * triton.cdiv(rows, BLOCK) * triton.cdiv(tokens, BLOCK),)](
                vectors,
                labels,
                negatives,
                positives,
                of_negatives,
                of_positives,
                out,
                start,
                rows,
                tokens,
                width,
                *vectors.stride(),
                ctx.temperature,
                BLOCK=BLOCK,
                BLOCK_D=BLOCK_D,
                num_warps=COEFFICIENTS_WARPS,
            )
            return out

        return sums_over_pairs(coefficients, vectors, labels >= 0), None, None


def log_sums(vectors: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """`reference.log_sums`; at least one number in the vectors."""
    return _LogSums.apply(vectors, labels.contiguous(), float(temperature))


def _variant(name: str, kernel: Any, kind: str, warps: int, *extra: str) -> Variant:
    sizes = ("tokens", "width", "batch_stride", "stride", *extra)
    sums = ("negatives", "positives")
    pointers = (*sums, "of_negatives", "of_positives", "out") if extra else sums
    return Variant(
        f"simreg {name}, {kind}",
        kernel,
        {
            "vectors": f"*{kind}",
            "labels": "*i64",
            **dict.fromkeys(pointers, "*fp32"),
            **dict.fromkeys(sizes, "i32:16"),
            "temperature": "fp32",
        },
        # Triton turns a stride of 1 into a constant.
        {"step": 1, "BLOCK": BLOCK, "BLOCK_D": BLOCK_D},
        num_warps=warps,
    )


VARIANTS = [
    variant
    for kind in ("fp32", "bf16")
    for variant in (
        _variant("sums", _sums, kind, SUMS_WARPS),
        _variant("coefficients", _coefficients, kind, COEFFICIENTS_WARPS, "first", "rows"),
    )
]
