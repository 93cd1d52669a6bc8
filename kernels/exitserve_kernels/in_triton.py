"""What the fused forms share. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

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
    """tanh without libdevice, which the interpreter lacks."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """A float32 in another type, rounded to the nearest."""
    if INTERPRETED and dtype == tl.bfloat16:
        # The interpreter cuts the lower bits off; a GPU rounds to the nearest, ties to even.
        bits = x.to(tl.int32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        x = tl.where(x == x, (bits & -65536).to(tl.float32, bitcast=True), x)
    return x.to(dtype)
