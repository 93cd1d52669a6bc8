"""Compiles every fused kernel for GPUs that need not be present, and reports what each needs.

    python -m exitserve_kernels.ahead_of_time [--arch 90]

Prints JSON: registers per thread, bytes of stack (for registers that spill) and of shared memory,
by kernel and target. Needs Triton, but no GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ARCHITECTURES = (80, 90, 100)
"""A100, H100 and H200, B200."""

OPERATIONS = ("exit_check", "propagate_kv", "logit_losses")
"""Folders with a `fused` module, which has `VARIANTS`."""


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


class Needs(NamedTuple):
    """What a compiled kernel uses."""

    registers: int
    stack: int
    shared: int


def variants() -> Iterator[Variant]:
    """The variants of all operations."""
    for operation in OPERATIONS:
        yield from import_module(f"exitserve_kernels.{operation}.fused").VARIANTS


def compile_for(variant: Variant, arch: int) -> Needs:
    """Compiles a kernel for a compute capability.

    Args:
        variant: the kernel.
        arch: 80, 90 or 100.

    Raises:
        RuntimeError: it does not compile.
    """
    import triton
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**variant.arguments, **dict.fromkeys(variant.constants, "constexpr")}
    ordered = {name: signature[name] for name in variant.kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, kind in enumerate(ordered.values())
        if kind.startswith("*") or kind.endswith(":16")
    }
    ordered = {name: kind.removesuffix(":16") for name, kind in ordered.items()}
    source = ASTSource(
        fn=variant.kernel, signature=ordered, constexprs=variant.constants, attrs=aligned
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        usage = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    return Needs(found["REG"], found["STACK"], int(compiled.metadata.shared))


def main() -> None:
    """Compiles all kernels, and fails if one spills more than is accepted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, help="default: all")
    chosen = parser.parse_args().arch
    found: dict[str, dict[str, dict[str, int]]] = {}
    spilled = []
    for variant in variants():
        for arch in [chosen] if chosen else ARCHITECTURES:
            if arch < variant.least_arch:
                continue
            needs = compile_for(variant, arch)
            found.setdefault(variant.name, {})[f"sm_{arch}"] = needs._asdict()
            if needs.stack > variant.spills:
                spilled.append(
                    f"{variant.name}, sm_{arch}: {needs.stack} bytes of stack, "
                    f"accepted {variant.spills}"
                )
    print(json.dumps(found, indent=2))
    if spilled:
        sys.exit("\n".join(spilled))


if __name__ == "__main__":
    main()
