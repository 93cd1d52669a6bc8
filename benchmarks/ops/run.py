"""Times the kernels against PyTorch, on this machine's GPU.

    python benchmarks/ops/run.py [--out FILE.json] [--small]

First the tests of the kernels run; where one fails nothing is timed. Then each operation is timed
in turn with its rivals, round after round, and each is divided by the rival's time in the same
round. `exit_check`: against a library's product with the head, softmax and max; with the share of
the bandwidth that a copy reaches in the same run. `propagate_kv`: against the same steps layer by
layer in PyTorch. `compact_rows`: against indexing, which waits for the host.

Without a GPU the PyTorch forms alone are timed, with `--small`, which shows that the script runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from exitserve.report import machine, markdown_table, versions
from exitserve_kernels.compact_rows import Batch, compact_rows
from exitserve_kernels.dispatch import can_run_triton
from exitserve_kernels.exit_check import FinalNorm, exit_check
from exitserve_kernels.propagate_kv import Caches, KeyNorm, Rotary, fill

ROOT = Path(__file__).parents[2]
ROUNDS = 7
BATCHES = (1, 8, 32, 128, 512)
Work = Callable[[], Any]


def main() -> None:
    """Tests, times, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="also write JSON")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--skip-tests", action="store_true", help="only with --small")
    options = parser.parse_args()
    if not (options.small and options.skip_tests):
        _refuse_unless_green()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.small:
        sys.exit("no GPU here: nothing to time. --small times the PyTorch forms.")
    bandwidth = _bandwidth(device)
    lines = [
        *_exit_checks(device, bandwidth, options.small),
        *_fills(device, options.small),
        *_compactions(device, options.small),
    ]
    print(f"{machine()}\ncopy: {bandwidth / 1e9:.0f} GB/s\n")
    headers = ["operation", "rows", "fused, µs", "PyTorch, µs", "ratio (range)", "of bandwidth"]
    print(markdown_table(headers, [list(line.values()) for line in lines]))
    if options.out is not None:
        found = {"machine": machine(), "versions": versions(), "bytes_per_second": bandwidth}
        options.out.write_text(json.dumps({**found, "lines": lines}, indent=2) + "\n")


def _refuse_unless_green() -> None:
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(ROOT / "tests" / "ops")],
        cwd=ROOT,
        env=environment,
        check=False,
    )
    if done.returncode:
        sys.exit("the kernels' tests fail, so their times say nothing; mend them first.")


def _seconds(work: Work, device: torch.device) -> float:
    """Of one call: many in a row, so that launches overlap as they do in use."""
    calls = 20 if device.type == "cuda" else 2
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / calls


def _against(
    name: str, rows: int, forms: Mapping[str, Work], device: torch.device
) -> dict[str, str]:
    """A line of the table: both forms in turn, round after round; the first round warms up."""
    times: dict[str, list[float]] = {form: [] for form in forms}
    for turn in range(ROUNDS + 1):
        for form, work in forms.items():
            seconds = _seconds(work, device)
            if turn:
                times[form].append(seconds)
    line = {"operation": name, "rows": str(rows), "fused": "-"}
    line["torch"] = f"{1e6 * statistics.median(times['torch']):.1f}"
    line["ratio"] = "-"
    if "triton" in times:
        line["fused"] = f"{1e6 * statistics.median(times['triton']):.1f}"
        ratios = [a / b for a, b in zip(times["triton"], times["torch"], strict=True)]
        line["ratio"] = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    return {**line, "bandwidth": ""}


def _bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy, read and written."""
    source = torch.empty(
        1 << (30 if device.type == "cuda" else 26), dtype=torch.uint8, device=device
    )
    target = torch.empty_like(source)
    times = [_seconds(lambda: target.copy_(source), device) for _ in range(5)]
    return 2 * source.numel() / statistics.median(times)


def _forms(call: Callable[[str], Work], device: torch.device) -> dict[str, Work]:
    forms = ["triton", "torch"] if device.type == "cuda" and can_run_triton(device) else ["torch"]
    return {form: call(form) for form in forms}


def _exit_checks(device: torch.device, bandwidth: float, small: bool) -> list[dict[str, str]]:
    """Llama 3 8B's head, and Qwen's with the norm in front."""
    vocabulary, width = (4096, 256) if small else (128_256, 4096)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    weight = torch.randn(vocabulary, width, device=device, dtype=dtype)
    norm = FinalNorm(torch.ones(width, device=device, dtype=dtype), 1e-6)
    lines = []
    for rows in BATCHES[: 2 if small else None]:
        states = torch.randn(rows, width, device=device, dtype=dtype)
        thresholds = torch.full((rows,), 0.5, device=device)

        def call(form: Any, states: Any = states, thresholds: Any = thresholds) -> Work:
            return lambda: exit_check(states, weight, thresholds, norm=norm, implementation=form)

        line = _against("exit_check", rows, _forms(call, device), device)
        if line["fused"] != "-":
            moved = weight.numel() * weight.element_size()
            line["bandwidth"] = f"{moved / bandwidth / (float(line['fused']) * 1e-6):.0%}"
        lines.append(line)
    return lines


def _fills(device: torch.device, small: bool) -> list[dict[str, str]]:
    """24 layers above an exit, 8 kv heads of 128, key norm and rotary, blocks of 16."""
    layers, heads, size, blocks = (3, 2, 16, 64) if small else (24, 8, 128, 2048)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    caches = [
        torch.zeros(blocks, heads, 16, 2 * size, device=device, dtype=dtype) for _ in range(layers)
    ]
    views = [cache.transpose(1, 2).split(size, dim=-1) for cache in caches]
    paged = Caches([view[0] for view in views], [view[1] for view in views])
    table = torch.randn(8192, size, device=device, dtype=dtype)
    options: dict[str, Any] = {
        "key_norm": KeyNorm(torch.ones(layers, size, device=device, dtype=dtype), 1e-6),
        "rotary": Rotary([table] * layers),
    }
    lines = []
    for rows in BATCHES[: 2 if small else None]:
        projected = torch.randn(rows, layers, 2, heads * size, device=device, dtype=dtype)
        positions = torch.randint(0, 8192, (rows,), device=device)
        slots = torch.randperm(blocks * 16, device=device)[:rows]

        def call(
            form: Any, projected: Any = projected, positions: Any = positions, slots: Any = slots
        ) -> Work:
            return lambda: fill(projected, positions, slots, paged, implementation=form, **options)

        lines.append(_against("propagate_kv", rows, _forms(call, device), device))
    return lines


def _compactions(device: torch.device, small: bool) -> list[dict[str, str]]:
    """Decode batches of which half the rows exit; contexts of 8k tokens."""
    width, blocks = (64, 8) if small else (4096, 512)
    lines = []
    for rows in BATCHES[1 : 2 if small else None]:
        batch = Batch(
            states=torch.randn(rows, width, device=device),
            positions=torch.arange(rows, device=device),
            slots=torch.arange(rows, device=device),
            starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
            lengths=torch.ones(rows, dtype=torch.int32, device=device),
            blocks=torch.zeros(rows, blocks, dtype=torch.int32, device=device),
        )
        exits = torch.arange(rows, device=device) % 2 == 0

        def call(form: Any, exits: Any = exits, batch: Any = batch) -> Work:
            return lambda: compact_rows(exits, batch, implementation=form)

        lines.append(_against("compact_rows", rows, _forms(call, device), device))
    return lines


if __name__ == "__main__":
    main()
