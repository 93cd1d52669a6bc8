"""Functions that the fused forms share. Imports Triton."""

import triton
import triton.language as tl

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
