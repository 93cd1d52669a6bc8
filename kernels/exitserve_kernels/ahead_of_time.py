"""What `benchmarks/ops/ahead_of_time.py` compiles, for GPUs that need not be present."""

from typing import Any, NamedTuple


class Variant(NamedTuple):
    """A kernel with the constants of a launch."""

    name: str
    kernel: Any
    arguments: dict[str, str]
    """Triton's type of each argument that is not a constant: `*bf16`, `i32`, `fp32`.

    `i32:16` is a multiple of 16, as sizes and strides usually are; pointers always are.
    """
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    spills: int = 0
    """Bytes of stack per thread that are accepted."""
    least_arch: int = 80
    """The least compute capability: e4m3 floats need 89."""
