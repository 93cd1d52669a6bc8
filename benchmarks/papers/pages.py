"""Fills the tables and draws the plots of docs/papers from docs/papers/results.

    python benchmarks/papers/pages.py

A page holds `<!-- table: NAME -->` and `<!-- end -->`; what lies between is made here, from the
JSON that the studies left, and from nothing else.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from exitserve.report import PLOT_DPI, markdown_table
from exitserve_training.inspect.plots import by_depth

PAGES = Path(__file__).parents[2] / "docs" / "papers"
RESULTS = PAGES / "results"
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Runs = Mapping[str, Mapping[str, Any]]
"""`variant/seed` to what was measured."""
Of = Callable[[Mapping[str, Any]], float]
"""One number of a run."""


def runs_of(study: str) -> Runs:
    """The runs of a study."""
    runs: Runs = json.loads((RESULTS / f"{study}.json").read_text(encoding="utf-8"))["runs"]
    return runs


def variants(runs: Runs) -> list[str]:
    """Their variants, in order."""
    return list(dict.fromkeys(name.rpartition("/")[0] for name in runs))


def values(runs: Runs, variant: str, of: Of) -> list[float]:
    """One number of each seed of a variant."""
    return [of(run) for name, run in runs.items() if name.rpartition("/")[0] == variant]


def spread(found: Sequence[float], form: str = ".3f") -> str:
    """Mean and standard deviation over seeds."""
    if not found:
        return "-"
    deviation = statistics.stdev(found) if len(found) > 1 else 0.0
    return f"{format(statistics.mean(found), form)} ± {format(deviation, form)}"


def at_depth(group: str, key: str, depth: int) -> Of:
    """A number that a run has for each depth."""
    return lambda run: float(run[group][str(depth)][key])


def by_depth_table(study: str, group: str, key: str, depths: Sequence[int], form: str) -> str:
    """A line a variant, a column a depth; depths that a variant lacks stay empty."""
    runs = runs_of(study)
    lines = []
    for variant in variants(runs):
        known = next(run[group] for name, run in runs.items() if name.startswith(f"{variant}/"))
        cells = [
            spread(values(runs, variant, at_depth(group, key, depth)), form)
            if str(depth) in known
            else ""
            for depth in depths
        ]
        lines.append([variant, *cells])
    return markdown_table(["", *[f"depth {depth}" for depth in depths]], lines)


def exits_table(study: str, thresholds: Sequence[str]) -> str:
    """Accuracy and depth speedup at some thresholds, and the full model's accuracy."""
    runs = runs_of(study)
    lines = []
    for variant in variants(runs):
        if "exits" not in next(r for n, r in runs.items() if n.startswith(f"{variant}/")):
            continue
        cells = [spread(values(runs, variant, lambda run: 100 * run["full_accuracy"]), ".1f")]
        for one in thresholds:
            accuracy = values(
                runs, variant, lambda run, one=one: 100 * run["exits"][one]["accuracy"]
            )
            depth = values(runs, variant, lambda run, one=one: run["exits"][one]["depth_speedup"])
            cells += [spread(accuracy, ".1f"), spread(depth, ".2f")]
        lines.append([variant, *cells])
    headers = ["", "full, %"]
    for one in thresholds:
        headers += [f"τ {one}: %", f"τ {one}: depth speedup"]
    return markdown_table(headers, lines)


def curves(study: str, group: str, key: str, ylabel: str, only: Sequence[str] = ()) -> Figure:
    """The means over seeds against depth, a curve a variant."""
    runs = runs_of(study)
    found: dict[str, dict[int, float]] = {}
    for variant in only or variants(runs):
        known = next(run[group] for name, run in runs.items() if name.startswith(f"{variant}/"))
        found[variant] = {
            int(depth): statistics.mean(values(runs, variant, at_depth(group, key, int(depth))))
            for depth in known
        }
    return by_depth(found, ylabel)


TABLES: dict[str, Callable[[], str]] = {
    "aligned-texts-loss": lambda: by_depth_table(
        "aligned-texts", "layers", "loss", range(1, 7), ".3f"
    ),
    "aligned-texts-accuracy": lambda: by_depth_table(
        "aligned-texts", "layers", "accuracy", range(1, 7), ".3f"
    ),
    "aligned-texts-cos": lambda: by_depth_table(
        "aligned-texts", "inspected", "cos", range(1, 7), ".2f"
    ),
    "aligned-texts-cka": lambda: by_depth_table(
        "aligned-texts", "inspected", "cka", range(1, 7), ".2f"
    ),
}

PLOTS: dict[str, Callable[[], Figure]] = {
    "aligned-texts-loss": lambda: curves("aligned-texts", "layers", "loss", "held-out loss (nats)"),
    "aligned-texts-cos": lambda: curves(
        "aligned-texts", "inspected", "cos", "cosine with the last layer"
    ),
}


def filled(page: str) -> str:
    """A page with its tables made anew."""
    return MARKED.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n\n{m[3]}", page)


def main() -> None:
    """Writes the pages and their plots."""
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    for name, draw in PLOTS.items():
        draw().savefig(PAGES / f"{name}.png", dpi=PLOT_DPI)


if __name__ == "__main__":
    main()
