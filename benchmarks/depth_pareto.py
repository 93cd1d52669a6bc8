"""What depth a model's exits could save at which agreement, were checks free, by criterion.

    python benchmarks/depth_pareto.py MODEL --data FILE.jsonl --out DIR

Exact keys and values (mode `defer`), every check made, no price on a check: the best that
thresholds by exit layer can do. Gates are fitted to a third of the windows, thresholds chosen on
another for the least mean depth at each price of a wrong token, and judged on the last. Nothing is
promised: `exitserve calibrate` promises, and counts what checks cost. Writes a plot and numbers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from exitserve.calibration.outcomes import Piece
from exitserve.calibration.pieces import independent_windows
from exitserve.calibration.proposals import Proposal, propose
from exitserve.calibration.scores import ExitScores, all_scores, read_exits
from exitserve.costs.byte_costs import TokenCosts
from exitserve.reference import load_reference
from exitserve.reporting.report import (
    machine,
    markdown_table,
    prepare_out_dir,
    versions,
    write_json,
)
from exitserve.windows import load_tokenizer, read_documents, windows_of
from exitserve_kernels.exit_check import CRITERIA

SEED = 11
PRICES = tuple(200.0 * 0.75**step for step in range(28))
"""Of a wrong token, in full-depth tokens."""
TARGETS = (0.99, 0.98, 0.95, 0.9)


def main() -> None:
    """Measures, prints, plots and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--data", required=True, metavar="FILE", help="text, or .jsonl")
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--exit-layers", metavar="N,N", help="instead of the checkpoint's own")
    parser.add_argument("--windows", type=int, default=600)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    args = parser.parse_args()
    out = prepare_out_dir(args.out, overwrite=True)
    curves = curves_of(args)
    data = {"model": args.model, "curves": curves, "machine": machine(), "versions": versions()}
    write_json(out / "depth_pareto.json", data)
    plot(curves, out / "depth_pareto.png")
    headers = ("criterion", *(f"at {target:g}" for target in TARGETS))
    rows = [[name, *(speedup_at(curve, one) for one in TARGETS)] for name, curve in curves.items()]
    print("depth speedup by agreement, checks free, exact keys and values")
    print(markdown_table(headers, rows))


def curves_of(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """By criterion, agreement and depth at each price, the safest first."""
    layers = [int(one) for one in args.exit_layers.split(",")] if args.exit_layers else None
    reference = load_reference(args.model, layers, criterion="max_prob")
    documents = read_documents(args.data)
    every = windows_of(documents, load_tokenizer(args.model), args.window, sys.maxsize, SEED)
    windows = independent_windows(every, args.windows, SEED, running=documents.running)
    pieces = [Piece(window.token_ids, args.prompt_tokens, "text") for window in windows]
    choose, judge = (pieces[part::2] for part in range(2))
    found = [
        all_scores([read_exits(reference, piece, {}) for piece in track(part, doing)])
        for part, doing in ((choose, "choosing"), (judge, "judging"))
    ]
    depth = TokenCosts(
        num_layers=reference.parts.num_layers, layer=1.0, fill=0.0, check=0.0, head=0.0
    )
    curves = {}
    for criterion in map(str, CRITERIA):
        chosen = propose(found[0], criterion, depth, prices=PRICES)
        curves[criterion] = [judged(found[1], one, depth.num_layers) for one in chosen]
    return curves


def judged(scores: Mapping[int, ExitScores], proposal: Proposal, num_layers: int) -> dict[str, Any]:
    """Agreement and depth of thresholds: each token leaves at the first exit that it passes."""
    agrees = torch.ones_like(next(iter(scores.values())).agrees)
    depth = torch.full(agrees.shape, num_layers)
    for layer, threshold in reversed(proposal.thresholds):
        own = scores[layer]
        leaves = (own.confidence[proposal.criterion] > threshold) & ~own.ends
        agrees = torch.where(leaves, own.agrees, agrees)
        depth = torch.where(leaves, layer, depth)
    mean_depth = float(depth.double().mean())
    return {
        "thresholds": dict(proposal.thresholds),
        "agreement": round(float(agrees.double().mean()), 4),
        "mean_depth": round(mean_depth, 3),
        "depth_speedup": round(num_layers / mean_depth, 4),
    }


def speedup_at(curve: Sequence[Mapping[str, Any]], agreement: float) -> str:
    """Depth speedup where a curve crosses an agreement, along a straight line."""
    points = sorted((one["agreement"], one["depth_speedup"]) for one in curve)
    for (low, fast), (high, slow) in pairwise(points):
        if low <= agreement <= high:
            share = (agreement - low) / (high - low or 1.0)
            return f"{fast + share * (slow - fast):.2f}"
    return ""


def plot(curves: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Agreement against depth speedup, one line for each criterion."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4.4), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        places = [one["depth_speedup"] for one in curve]
        axes.plot(places, [one["agreement"] for one in curve], marker="o", markersize=3, label=name)
    axes.axhline(0.98, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xlabel("depth speedup (checks free, exact keys and values)")
    axes.set_ylabel("agreement with full depth")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
