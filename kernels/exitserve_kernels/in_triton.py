"""Functions that the fused forms share. Imports Triton."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 256
"""Rows of a sequence whose coefficients [B, ROWS, T] float32 exist at a time in backward."""

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run in Triton's interpreter, on a CPU."""


@triton.jit
def dot(a, b, total):
    """total + a @ b in float32; products of float32 are not rounded to TF32."""
    if INTERPRETED:
        # The interpreter stores bfloat16 as integers, and multiplies those.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def tanh(x):
    """tanh without libdevice, which the interpreter lacks; error at most 8.2e-8.

    Small numbers use a series, because exponentials would lose their digits.
    """
    square = x * x
    series = 2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0))
    small = x + x * square * (-1.0 / 3.0 + square * series)
    power = tl.exp(-2.0 * tl.abs(x))
    large = 1.0 - 2.0 * power / (1.0 + power)
    return tl.where(tl.abs(x) < 0.3, small, tl.where(x < 0, -large, large))


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """Converts float32 to another type, rounding to nearest."""
    if INTERPRETED and dtype.primitive_bitwidth < 32 and dtype != tl.float16:
        # The interpreter truncates; a GPU rounds to nearest, ties to even.
        cut: tl.constexpr = 23 - dtype.fp_mantissa_width
        bits = x.to(tl.int32, bitcast=True)
        bits = bits + ((1 << (cut - 1)) - 1) + ((bits >> cut) & 1)
        x = tl.where(x == x, ((bits >> cut) << cut).to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def arccos(x):
    """arccos of numbers in [-1, 1] without libdevice; error at most 2.2e-7.

    asin(r) = r + r^3 P(r^2), with P fitted on r <= 1/2 (error of the fit 1.6e-9). Beyond that,
    arccos(|x|) = 2 asin(sqrt((1 - |x|) / 2)), whose argument has no rounding error near 1.
    """
    outer = tl.abs(x) > 0.5
    square = tl.where(outer, 0.5 - 0.5 * tl.abs(x), x * x)
    root = tl.where(outer, tl.sqrt_rn(square), x)
    series = 0.04376305985618546 * square + 0.023142273294909553
    series = series * square + 0.04570778987830207
    series = series * square + 0.07493077161384654
    series = series * square + 0.1666682153034376
    rest = root * (square * series)
    # pi / 2 as a difference of two numbers: one float32 would be off by 4.4e-8.
    turned = 1.5707963705062866 - (root + (rest + 4.371139000186241e-08))
    return tl.where(outer, 2.0 * tl.where(x < 0.0, turned, root + rest), turned)


@triton.jit
def inner_products(vectors, first, second, tokens, width, stride, step, block_d: tl.constexpr):
    """Inner products [M, N] float32 of tokens `first` [M] with `second` [N]; 0 beyond `tokens`.

    `vectors` points at one sequence [T, D] with these strides.
    """
    first_at = vectors + first.to(tl.int64)[:, None] * stride
    second_at = vectors + second.to(tl.int64)[:, None] * stride
    total = tl.zeros([first.shape[0], second.shape[0]], dtype=tl.float32)
    for start in range(0, width, block_d):
        place = start + tl.arange(0, block_d)[None, :]
        a = tl.load(first_at + place * step, (first < tokens)[:, None] & (place < width), 0.0)
        b = tl.load(second_at + place * step, (second < tokens)[:, None] & (place < width), 0.0)
        total = dot(a, tl.trans(b), total)
    return total


@triton.jit
def tile_of_rows(rows, tokens, block: tl.constexpr):
    """This program's sequence, rows and columns, where each has a tile of [rows, tokens] pairs."""
    tiles = tl.cdiv(tokens, block)
    row_tile = tl.program_id(0) // tiles
    row_tiles = tl.cdiv(rows, block)
    row = row_tile % row_tiles * block + tl.arange(0, block)
    column = tl.program_id(0) % tiles * block + tl.arange(0, block)
    return (row_tile // row_tiles).to(tl.int64), row, column


def sums_over_pairs(
    coefficients: Callable[[int, int], Tensor], vectors: Tensor, counted: Tensor
) -> Tensor:
    """The sum over j of c_ij v_j for every token i: [B, T, D] in the vectors' type.

    A kernel computes the coefficients, `ROWS` rows at a time; PyTorch multiplies, in float32. With
    D / 4 operations for each byte of coefficients, writing them costs almost nothing.

    Args:
        coefficients: computes c_ij for rows start to stop, [B, stop - start, T] float32.
        vectors: [B, T, D].
        counted: bool [B, T]; where it is False the coefficients are 0 and the vector may be NaN.
    """
    tokens = vectors.shape[1]
    absent = ~counted[..., None]
    wide = vectors.float().masked_fill(absent, 0.0)
    sums = torch.empty_like(wide)
    # The vectors' common part cancels in these sums: bfloat16 would leave no digits.
    with torch.autocast(vectors.device.type, enabled=False):
        for start in range(0, tokens, ROWS):
            stop = min(start + ROWS, tokens)
            sums[:, start:stop] = coefficients(start, stop) @ wide
    # 0 times NaN, if another token of the sequence has NaN.
    return sums.masked_fill_(absent, 0.0).to(vectors.dtype)


@triton.jit
def add_scores(top, total, scores):
    """Updates a running maximum and a running sum of exp(score - maximum) with more scores."""
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    # -inf - -inf is NaN: as long as there is no pair, all powers must be 0.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    # The maximum may drop a NaN; this sum does not.
    powers = tl.sum(tl.exp(scores - base[:, None]), axis=1)
    return new_top, total * tl.exp(top - base) + powers
