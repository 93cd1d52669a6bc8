"""Plots the loss at each exit against the tokens seen, from the lines that training prints.

    python benchmarks/training_curve.py LOG ... --seen 7.0 --out PLOT.png

LOG files are of stages that follow one another. A stage that begins from a grown model names its
exits by the depth that they now have; the plot goes by share of the depth. Lines of exit-aware
steps are left out: their losses by layer are of the tokens that still run there.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections import defaultdict
from pathlib import Path

LINE = re.compile(r"^step ([\d,]+) of .*? \| ([\d.,]+)M tokens.*\(at layer (.*?)\)")
LINES_TOGETHER = 12
"""Lines of which a point is the mean."""
SHARES = ("a quarter", "half", "three quarters", "all of the depth")


def main() -> None:
    """Reads, plots, and prints the last point of each curve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG")
    parser.add_argument("--seen", type=float, default=0.0, help="million tokens before the first")
    parser.add_argument("--exit-aware-from", type=int, metavar="STEP", help="in the last stage")
    parser.add_argument("--held-out", action="append", default=[], metavar="TOKENS=A,B,C,D")
    parser.add_argument("--out", type=Path, required=True, metavar="PNG")
    args = parser.parse_args()
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    seen = args.seen
    for log in args.logs:
        most = args.exit_aware_from if log == args.logs[-1] else None
        seen = add_stage(curves, log.read_text(), seen, most)
    held_out = {
        float(at): list(map(float, by.split(",")))
        for at, by in (one.split("=") for one in args.held_out)
    }
    plot(curves, held_out, args.out)


def add_stage(
    curves: dict[str, list[tuple[float, float]]], text: str, before: float, most: int | None
) -> float:
    """Adds a stage's points, by million tokens; returns the tokens seen at its end."""
    by_step: dict[int, tuple[float, list[float]]] = {}
    tokens = 0.0
    for found in filter(None, map(LINE.match, text.splitlines())):
        step, tokens = int(found[1].replace(",", "")), float(found[2].replace(",", ""))
        losses = [float(part.split(": ")[1]) for part in found[3].split(", ")]
        if most is None or step <= most:  # a stage that was resumed repeats some steps
            by_step[step] = tokens, losses
    lines = [by_step[step] for step in sorted(by_step)]
    for start in range(0, len(lines) - LINES_TOGETHER + 1, LINES_TOGETHER):
        some = lines[start : start + LINES_TOGETHER]
        at = before + statistics.fmean(one for one, _ in some)
        for place, share in enumerate(SHARES):
            curves[share].append((at, statistics.fmean(losses[place] for _, losses in some)))
    return before + tokens


def plot(
    curves: dict[str, list[tuple[float, float]]], held_out: dict[float, list[float]], out: Path
) -> None:
    """Writes the picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for place, (share, points) in enumerate(curves.items()):
        (line,) = axes.plot(*zip(*points, strict=True), label=share, linewidth=1.5)
        pairs = [(at, losses[place]) for at, losses in sorted(held_out.items())]
        axes.plot(*zip(*pairs, strict=True), "o", color=line.get_color(), markersize=5)
    axes.set_xlabel("tokens seen, millions")
    axes.set_ylabel("loss, nats a token (lines: training, dots: held out)")
    axes.legend(title="after", frameon=False)
    axes.grid(alpha=0.25)
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    main()
