"""Compiles every fused kernel for GPUs that need not be present, and reports what each needs.

    python benchmarks/ops/ahead_of_time.py [--arch 90]

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
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton.language as tl

from exitserve_kernels.exit_check import fused as exit_check
from exitserve_kernels.logit_losses import fused as logit_losses
from exitserve_kernels.propagate_kv import fused as propagate_kv

ARCHITECTURES = (80, 90, 100)
"""A100, H100 and H200, B200."""
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


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


def _tiles_variant(block_b: int, kind: str) -> Variant:
    """All options on: the most registers."""
    pointers = dict.fromkeys(("rows", "weight", "bias", "kept"), f"*{kind}")
    numbers = dict.fromkeys(("num_rows", "columns", "first_token"), "i32")
    strides = dict.fromkeys(("width", "row_stride", "weight_stride", "kept_stride"), "i32:16")
    return Variant(
        f"exit_check tiles, {block_b} rows, {kind}",
        exit_check._tiles,
        {
            **pointers,
            "ends": "*i1",
            "out": "*fp32",
            **numbers,
            **strides,
            **dict.fromkeys(("soft_cap", "scale"), "fp32"),
        },
        {
            **dict.fromkeys(("HAS_BIAS", "HAS_CAP", "HAS_ENDS"), True),
            **dict.fromkeys(("ROUNDED", "KEEP"), True),
            # Triton turns a stride of 1 into a constant.
            "row_step": 1,
            "weight_step": 1,
            "BLOCK_B": block_b,
            "BLOCK_V": exit_check.TILE_V,
            "BLOCK_D": exit_check.TILE_D,
            "WIDTH": exit_check.WIDTH,
        },
        num_warps=exit_check.warps_of(block_b),
        spills=104 if kind == "fp32" else 0,  # on an A100
    )


def _fill_variant(cache: Any, name: str) -> Variant:
    """A layer like Qwen3's: 8 kv heads of 128, key norm, rotary; all options on."""
    return Variant(
        f"propagate_kv, {name} cache",
        propagate_kv._fill,
        {
            **dict.fromkeys(("projected", "gains"), "*bf16"),
            **dict.fromkeys(("positions", "slots", "addresses", "tables"), "*i64"),
            **dict.fromkeys(("key_scales", "value_scales"), "*fp32"),
            **dict.fromkeys(("num_layers", "slot_stride"), "i32"),
            **dict.fromkeys(
                (
                    "row_stride",
                    "layer_stride",
                    "block_stride",
                    "place_stride",
                    "head_stride",
                    "gain_stride",
                ),
                "i32:16",
            ),
            **dict.fromkeys(("epsilon", "greatest"), "fp32"),
        },
        {
            "step": 1,
            "BLOCK_SIZE": 16,
            "HEADS": 8,
            "SIZE": 128,
            "ROTATED": 128,
            "INTERLEAVED": False,
            "NORM": 1,
            "SCALED": cache in (tl.float8e4nv, tl.float8e5),
            "CACHE": cache,
            "TABLE": tl.bfloat16,
            "BLOCK_H": 8,
            "BLOCK_P": 128,
        },
        least_arch=90 if cache == tl.float8e4nv else 80,
    )


def _losses_variant(kind: str, has_cap: bool, cooled: bool) -> Variant:
    return Variant(
        f"logit_losses, {kind}" + ", cap" * has_cap + ", temperature" * cooled,
        logit_losses._losses,
        {
            **dict.fromkeys(("logits", "teacher"), f"*{kind}"),
            "labels": "*i64",
            **dict.fromkeys(("ce_scale", "kl_scale", "cross_entropy", "divergence"), "*fp32"),
            **dict.fromkeys(("vocabulary", "stride", "teacher_stride"), "i32:16"),
            **dict.fromkeys(("coolness", "soft_cap"), "fp32"),
        },
        {
            # Triton turns a stride of 1 into a constant.
            **dict.fromkeys(("step", "teacher_step"), 1),
            **dict.fromkeys(("HAS_LABELS", "HAS_TEACHER", "DIFFERENTIATE"), True),
            "HAS_CAP": has_cap,
            "COOLED": cooled,
            "BLOCK": logit_losses.BLOCK,
        },
        num_warps=logit_losses.WARPS,
    )


VARIANTS = [
    *(
        _tiles_variant(block_b, kind)
        for kind, dtype in TYPES.items()
        for block_b in sorted({exit_check.block_of_rows(rows, dtype) for rows in (16, 32, 64, 128)})
    ),
    Variant(
        "exit_check join",
        exit_check._join,
        {
            **dict.fromkeys(("summaries", "out", "confidence"), "*fp32"),
            "exits": "*i1",
            **dict.fromkeys(("thresholds", "end_thresholds"), "*fp32"),
            "num_slices": "i32",
            "log_vocabulary": "fp32",
        },
        {
            "CRITERION": 2,
            "HAS_ENDS": True,
            "FINISH": True,
            "BLOCK_S": exit_check.SLICES,
            "WIDTH": exit_check.WIDTH,
        },
    ),
    _fill_variant(tl.bfloat16, "bf16"),
    _fill_variant(tl.float8e5, "fp8 (e5m2)"),
    _fill_variant(tl.float8e4nv, "fp8 (e4m3)"),
    *(
        _losses_variant(kind, has_cap, cooled)
        for kind in ("fp32", "bf16", "fp16")
        for has_cap, cooled in ((False, False), (True, True))
    ),
]


def main() -> None:
    """Compiles all kernels, and fails if one spills more than is accepted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, help="default: all")
    chosen = parser.parse_args().arch
    found: dict[str, dict[str, dict[str, int]]] = {}
    spilled = []
    for variant in VARIANTS:
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
