"""How far every operation is from float64: its fused form, PyTorch's, and Liger-Kernel's.

    python benchmarks/ops/errors.py [--out FILE.json]

The truth is PyTorch's form in float64 of the same inputs, which are numbers of the type in
question. The error is that of tests/ops: root mean square of the difference over that of the
truth. `results.py` has inputs and sizes, the same everywhere.

Without a GPU the kernels run in Triton's interpreter. In it, caches of 8 bits err two to three
times as much as PyTorch's: where rounding to 8 bits reaches the next power of two, it loses the
carry (Triton 3.9), and 1.999 becomes 1. All other elements err as PyTorch's.

In 16 bits PyTorch's exit check errs far more than the kernel: its product rounds the logits to
16 bits, the kernel keeps them in float32. Where both err by 1e-3 (bfloat16) or 1e-4 (float16),
that is the rounding of what is written.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import liger
import torch
from torch import Tensor

from exitserve.reporting.report import machine, machine_line, markdown_table, versions, write_json

if TYPE_CHECKING:
    from results import OperationRun

HEADERS = ["operation", "result", "type", "fused", "PyTorch", "Liger", "fused / PyTorch"]


class ErrorLine(NamedTuple):
    """The errors of one result; None for what Liger-Kernel does not compute."""

    operation: str
    result: str
    type: str
    fused: float
    torch: float
    liger: float | None

    def cells(self) -> list[str]:
        """The line in a table with `HEADERS`."""
        errors = [_words(found) for found in (self.fused, self.torch, self.liger)]
        # Below one step of float32, 1.2e-7, the ratio is chance.
        telling = max(self.fused, self.torch) > torch.finfo(torch.float32).eps
        ratio = f"{self.fused / self.torch:.2g}" if telling else "-"
        return [self.operation, self.result, self.type, *errors, ratio]


def error(result: Tensor, truth: Tensor) -> float:
    """Root-mean-square error relative to the root mean square of `truth`, in float64."""
    result, truth = result.double(), truth.double()
    scale = truth.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    return float((result - truth).square().mean().sqrt() / scale)


def _words(found: float | None) -> str:
    if found is None:
        return "-"
    return f"{found:.1e}" if found else "exact"


def main() -> None:
    """Computes, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="also write JSON")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    interpreted = device.type == "cpu"
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
        # numpy's, of infinities that kernels leave out.
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
    # Imports Triton, which looks for the interpreter then.
    from results import runs

    print(liger.remark())
    lines = [line for run in runs(interpreted) for line in _compared(run, device)]
    found = {
        "machine": machine(),
        "versions": versions() | liger.versions(),
        "interpreted": interpreted,
        "lines": [line._asdict() for line in lines],
    }
    print(("in Triton's interpreter, " if interpreted else "") + machine_line(found) + "\n")
    print(markdown_table(HEADERS, [line.cells() for line in lines]))
    if options.out is not None:
        write_json(options.out, found)


def _compared(run: OperationRun, device: torch.device) -> Iterator[ErrorLine]:
    """A line for each result."""

    def cast(x: Tensor) -> Tensor:
        return x.to(device, run.dtype)

    truth = run.results("torch", lambda x: cast(x).double())
    fused, plain = run.results("triton", cast), run.results("torch", cast)
    rival = run.results("liger", cast) if run.in_liger and liger.versions() else {}
    for name, exact in truth.items():
        yield ErrorLine(
            run.operation,
            name,
            str(run.dtype).removeprefix("torch."),
            error(fused[name], exact),
            error(plain[name], exact),
            error(rival[name], exact) if name in rival else None,
        )


if __name__ == "__main__":
    main()
