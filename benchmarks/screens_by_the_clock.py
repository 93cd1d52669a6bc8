"""What a token costs with screens and without, in measured times of this machine's parts.

    python benchmarks/screens_by_the_clock.py MODEL texts/mixed-b.jsonl

Layers, checks and screens are timed alone, one row each, at the shapes of MODEL, of
`llama-350m` and of `llama-1.3b` (all of 24 layers here). Which tokens a screen lets through, and
which of them pass, is read off MODEL's states on the text, at each threshold, exits one after the
other; each shape has the break-even that a server would have. A token's time is that of the layers
that it runs, its screens, its checks and, at full depth, the head; propagation is left out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import synthetic
import torch
from torch import Tensor

from exitserve.calibration.outcomes import Piece
from exitserve.calibration.pieces import independent_windows
from exitserve.calibration.scores import ExitScores, all_scores, read_exits
from exitserve.calibration.screening import LEVELS
from exitserve.checkpoint.block import read_config, read_multi_exit
from exitserve.costs.byte_costs import TokenCosts, break_even_rates
from exitserve.costs.sources import step_costs
from exitserve.reference import load_reference
from exitserve.reporting.report import markdown_table
from exitserve.screens import Screen, Screens, load_screens
from exitserve.windows import load_tokenizer, read_documents, windows_of

WINDOW, PROMPT, SEED = 256, 32, 0
ROUNDS = 300


@dataclass(frozen=True)
class Shape:
    """Measured parts of a shape, in seconds, and the break-even of its exits."""

    name: str
    costs: TokenCosts
    screen: float
    break_even: Mapping[int, float]


def screen_seconds(hidden: int) -> float:
    """The least time of one screen at a width, for one row in bfloat16."""
    width, knots = max(8, hidden // 8), torch.zeros(1)
    screen = Screen(
        torch.randn(width, hidden), torch.randn(width), torch.randn(width), knots, knots, knots
    )
    row, least, found = torch.randn(1, hidden, dtype=torch.bfloat16), torch.zeros(1), []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        (screen.score(row) > least).tolist()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def shape_called(name: str, config: Mapping[str, Any], exit_layers: Sequence[int]) -> Shape:
    """Times the parts of one shape."""
    return Shape(
        name,
        step_costs(config, dtype="bfloat16", context=WINDOW // 2).costs.of_tokens(1),
        screen_seconds(int(config["hidden_size"])),
        break_even_rates(config, exit_layers),
    )


def cost_of(
    shape: Shape,
    scores: Mapping[int, ExitScores],
    criterion: str,
    threshold: float,
    opened: Mapping[int, Tensor] | None,
) -> float:
    """Time of an average token as a share of full depth's, which is checked nowhere.

    Args:
        shape: what it costs.
        scores: by exit layer, of N tokens.
        criterion: of confidence.
        threshold: of every exit.
        opened: [N] by exit layer, whose check is made; None: everyone's, without screens.
    """
    costs = shape.costs
    count = len(next(iter(scores.values())).agrees)
    runs, seconds, depth = torch.ones(count, dtype=torch.bool), 0.0, 0
    for layer, one in scores.items():
        seconds += int(runs.sum()) * (layer - depth) * costs.layer
        asked = runs if opened is None else runs & opened[layer]
        seconds += int(runs.sum()) * shape.screen * (opened is not None)
        seconds += int(asked.sum()) * costs.check
        runs, depth = runs & ~(asked & (one.confidence[criterion] > threshold)), layer
    seconds += int(runs.sum()) * ((costs.num_layers - depth) * costs.layer + costs.head)
    return seconds / count / (costs.num_layers * costs.layer + costs.head)


def opened_by(
    screens: Screens, scores: Mapping[int, ExitScores], criterion: str, threshold: float, one: Shape
) -> dict[int, Tensor]:
    """[N] by exit layer: whose check is made."""
    return {
        layer: own.screen[criterion] > screens[layer].least_score(threshold, one.break_even[layer])
        for layer, own in scores.items()
    }


def rows_of(
    shapes: Sequence[Shape], scores: Mapping[int, ExitScores], screens: Screens, criterion: str
) -> list[list[str]]:
    """One row for each threshold: every check / screens / only checks that pass, by shape."""
    rows = []
    for threshold in LEVELS:
        cells = []
        for one in shapes:
            opened = opened_by(screens, scores, criterion, threshold, one)
            passing = {at: own.confidence[criterion] > threshold for at, own in scores.items()}
            free = Shape(one.name, one.costs, 0.0, one.break_even)
            found = (
                cost_of(one, scores, criterion, threshold, None),
                cost_of(one, scores, criterion, threshold, opened),
                cost_of(free, scores, criterion, threshold, passing),
            )
            cells.append(" / ".join(f"{cost:.3f}" for cost in found))
        rows.append([f"{threshold:g}", *cells])
    return rows


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("file")
    parser.add_argument("--windows", type=int, default=150)
    args = parser.parse_args()
    block = read_multi_exit(args.model)
    if block is None or block.screens_file is None:
        raise SystemExit(f"{args.model} has no screens.")
    shapes = [shape_called("the model", read_config(args.model), block.exit_layers)]
    for name in ("llama-350m", "llama-1.3b"):
        with tempfile.TemporaryDirectory() as folder:
            synthetic.write_checkpoint(name, Path(folder))
            shapes.append(shape_called(name, read_config(folder), block.exit_layers))
    for one in shapes:
        costs = one.costs
        print(
            f"{one.name}: layer {1e3 * costs.layer:.3f} ms, check {1e3 * costs.check:.3f}, "
            f"screen {1e3 * one.screen:.3f}, head {1e3 * costs.head:.3f}"
        )
    screens = load_screens(args.model, block.screens_file, block.exit_layers)
    reference = load_reference(str(args.model), block.exit_layers, dtype="bfloat16")
    documents = read_documents(args.file)
    every = windows_of(documents, load_tokenizer(args.model), WINDOW, limit=2**62, seed=SEED)
    windows = independent_windows(every, args.windows, SEED, running=documents.running)
    pieces = [Piece(one.token_ids, PROMPT, "text") for one in windows]
    by_criterion = {block.criterion: screens}
    scores = all_scores([read_exits(reference, piece, by_criterion) for piece in pieces])
    headers = ["threshold", *(one.name for one in shapes)]
    print(markdown_table(headers, rows_of(shapes, scores, screens, block.criterion)))


if __name__ == "__main__":
    main()
