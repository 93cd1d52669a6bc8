"""How near the predictions of `exitserve plan` come to what `exitserve bench` measures.

    python benchmarks/plan_against_bench.py --out benchmarks/results/plan-against-bench.json

For each synthetic shape: times the parts of a step as `plan` does, runs `bench` twice (rows that
exit unconditionally; then checks that pass by lot with probability 0.8),
and times the parts once more. Prints wall speedups as predicted and as measured, writes them with
the conditions, and exits with 1 if a prediction is off by more than 15 %.

Needs vLLM and a quiet machine, where it takes about half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import synthetic

from exitserve.costs.curves import StepCosts
from exitserve.costs.skipping import expected_seconds
from exitserve.costs.sources import CostSource, step_costs
from exitserve.reporting.report import machine, markdown_table, versions, write_json

LAYERS = (6, 12)
CONFIDENCE = 0.8
MAX_TOKENS = 48
ALLOWED = 0.15
"""Relative error of a predicted wall speedup."""
HEADERS = ("shape", "batch", "case", "predicted", "measured (min to max)", "error")


def main() -> int:
    """Runs the script; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shapes = list(synthetic.SHAPES)
    parser.add_argument("--shapes", nargs="+", default=shapes, metavar="NAME")
    parser.add_argument("--batch-sizes", default="1,8", metavar="B,B", help="default %(default)s")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default %(default)s")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="a JSON file")
    options = parser.parse_args()
    sizes = [int(size) for size in options.batch_sizes.split(",")]
    rows, sources = [], {}
    for shape in options.shapes:
        before = _plan(shape, sizes)
        cases = list(_measured_cases(shape, options))
        sources[shape] = [one.details for one in (before, _plan(shape, sizes))]
        rows += [_compared(shape, case, before.costs) for case in cases]
    worst = max(abs(row["error"]) for row in rows)
    report = {
        "machine": machine(),
        "versions": versions(),
        "plan": sources,
        "rows": rows,
        "worst_error": worst,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, report)
    print(markdown_table(HEADERS, [_line(row) for row in rows]))
    print(f"worst error {worst:.1%}, allowed {ALLOWED:.0%}; all numbers: {options.out}")
    return 1 if worst > ALLOWED else 0


def _plan(shape: str, sizes: list[int]) -> CostSource:
    """The costs that `exitserve plan` would use."""
    context = synthetic.PROMPT_TOKENS + MAX_TOKENS // 2
    found = step_costs(synthetic.SHAPES[shape], batch_sizes=sizes, context=context)
    for note in found.notes:
        print(f"{shape}: {note}", file=sys.stderr)
    return found


def _measured_cases(shape: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The cases of both runs of `bench` that `plan` has a prediction for."""
    forced = ["--exit-layers", ",".join(map(str, LAYERS))]
    by_lot = ["--exit-layers", str(LAYERS[0]), "--confidence", str(CONFIDENCE)]
    for arguments in (forced, by_lot):
        with tempfile.TemporaryDirectory(prefix="exitserve-") as folder:
            command = [sys.executable, synthetic.__file__, shape]
            command += [*arguments, "--batch-sizes", options.batch_sizes, "--requests", "4"]
            command += ["--max-tokens", str(MAX_TOKENS), "--repeats", str(options.repeats)]
            subprocess.run([*command, "--out", folder], check=True)
            report = json.loads((Path(folder) / "report.json").read_text(encoding="utf-8"))
        for case in report["cases"]:
            # Checks that never pass are left out by the engine's schedule, which plan ignores.
            by_checks = case["mode"] == "confidence" and arguments is not forced
            if case["mode"] == "fixed" or by_checks:
                yield case


def _compared(shape: str, case: Mapping[str, Any], costs: StepCosts) -> dict[str, Any]:
    batch = case["batch_size"]
    seconds = _seconds(case, costs)
    predicted = costs.full(batch) / seconds
    measured = case["wall_speedup"]
    return {
        "shape": shape,
        "batch_size": batch,
        "case": _name(case),
        "predicted": round(predicted, 4),
        "measured": measured,
        "predicted_ms": round(1e3 * seconds, 3),
        "measured_tpot_ms": case["tpot_ms"]["median"],
        "error": round(predicted / measured["median"] - 1.0, 4),
    }


def _seconds(case: Mapping[str, Any], costs: StepCosts) -> float:
    """Mean seconds of a step of the case, as predicted."""
    batch = case["batch_size"]
    if case["mode"] == "confidence":
        layer, full = LAYERS[0], costs.num_layers
        tokens = case["exit_layers"]
        left = tokens[str(layer)] / (tokens[str(layer)] + tokens[str(full)])
        return expected_seconds(costs, batch, {layer: left}, compacts=True)
    # Unconditional exits of all rows: no checks, one head.
    layer = int(case["exit_layer"])
    run = costs.rest(batch) + costs.exits(batch) + layer * costs.layer(batch) + costs.head(batch)
    return run + (costs.num_layers - layer) * costs.fill(batch)


def _name(case: Mapping[str, Any]) -> str:
    if case["mode"] == "confidence":
        return f"checks at {LAYERS[0]} pass with {CONFIDENCE:g}"
    return f"every token exits at {case['exit_layer']}"


def _line(row: Mapping[str, Any]) -> list[str]:
    measured = row["measured"]
    spread = f"{measured['median']:.2f} ({measured['min']:.2f} to {measured['max']:.2f})"
    cells = [row["shape"], str(row["batch_size"]), row["case"], f"{row['predicted']:.2f}"]
    return [*cells, spread, f"{row['error']:+.1%}"]


if __name__ == "__main__":
    sys.exit(main())
