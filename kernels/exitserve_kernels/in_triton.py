"""What the fused forms share. Imports Triton."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 256
"""Rows of a sequence whose pairs have coefficients at once in backward: [B, ROWS, T] float32."""

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run in Triton's interpreter, on a CPU."""


@triton.jit
def dot(a, b, total):
    """total + a @ b in float32; products of float32 are not rounded to TF32."""
    if INTERPRETED:
        # The interpreter multiplies bfloat16 as the integers that it keeps them in.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def tanh(x):
    """tanh without libdevice, which the interpreter lacks; off by at most 8.2e-8.

    The form by exponentials would lose small numbers' digits: they have their series.
    """
    square = x * x
    series = 2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0))
    small = x + x * square * (-1.0 / 3.0 + square * series)
    power = tl.exp(-2.0 * tl.abs(x))
    large = 1.0 - 2.0 * power / (1.0 + power)
    return tl.where(tl.abs(x) < 0.3, small, tl.where(x < 0, -large, large))


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """A float32 in another type, rounded to the nearest."""
    if INTERPRETED and dtype.primitive_bitwidth < 32 and dtype != tl.float16:
        # The interpreter cuts the lower bits off; a GPU rounds to the nearest, ties to even.
        cut: tl.constexpr = 23 - dtype.fp_mantissa_width
        bits = x.to(tl.int32, bitcast=True)
        bits = bits + ((1 << (cut - 1)) - 1) + ((bits >> cut) & 1)
        x = tl.where(x == x, ((bits >> cut) << cut).to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def arccos(x):
    """The angle in 0..pi of a cosine in -1..1, off by at most 2.2e-7; no libdevice needed.

    asin(r) = r + r^3 P(r^2), P fitted here on r <= 1/2 (the fit alone is off by 1.6e-9). Beyond,
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
    # pi / 2 is the first number less the second: one float32 is 4.4e-8 off.
    turned = 1.5707963705062866 - (root + (rest + 4.371139000186241e-08))
    return tl.where(outer, 2.0 * tl.where(x < 0.0, turned, root + rest), turned)


@triton.jit
def inner_products(vectors, first, second, tokens, width, stride, step, block_d: tl.constexpr):
    """[M, N] float32: the products of tokens `first` [M] with `second` [N]; 0 beyond `tokens`.

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


def sums_over_pairs(
    coefficients: Callable[[int, int], Tensor], vectors: Tensor, counted: Tensor
) -> Tensor:
    """sum over j of c_ij v_j for every token i: [B, T, D] in the vectors' type.

    The coefficients come from a kernel, `ROWS` rows at a time; the product is PyTorch's, in
    float32: D / 4 operations a byte of the coefficients, so writing them costs next to nothing.

    Args:
        coefficients: gives c_ij of the rows from start to stop, [B, stop - start, T] float32.
        vectors: [B, T, D].
        counted: bool [B, T]; where it is False the coefficients are 0 and the vector may be NaN.
    """
    tokens = vectors.shape[1]
    absent = ~counted[..., None]
    wide = vectors.float().masked_fill(absent, 0.0)
    sums = torch.empty_like(wide)
    # In bfloat16 these sums, in which the vectors' common part cancels, would have no digits.
    with torch.autocast(vectors.device.type, enabled=False):
        for start in range(0, tokens, ROWS):
            stop = min(start + ROWS, tokens)
            sums[:, start:stop] = coefficients(start, stop) @ wide
    # 0 times NaN, where another token has one.
    return sums.masked_fill_(absent, 0.0).to(vectors.dtype)


@triton.jit
def taken_in(top, total, scores):
    """The running greatest and the running sum of exp(score - greatest), with more scores."""
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    # -inf - -inf is NaN: where nothing is chosen yet, all powers are to be 0.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    # NaN may vanish from the greatest, but never from this sum.
    powers = tl.sum(tl.exp(scores - base[:, None]), axis=1)
    return new_top, total * tl.exp(top - base) + powers
