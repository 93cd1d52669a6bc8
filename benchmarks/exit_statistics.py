"""Exit statistics of a checkpoint on held-out text, by the oracle's teacher-forced pass.

    python benchmarks/exit_statistics.py MODEL DATASET

MODEL is a checkpoint directory, DATASET a packed dataset as `exitserve train` keeps it (the
folder below `data/` in a run's output directory). Prints a Markdown table: for each threshold
the share of tokens that exit, where they stop, how often the exited token is the one that full
depth would choose, and agreement and perplexity over all tokens (exited or not). Every token is
checked at every exit layer, as with `exitserve serve --exit-rows all`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

import datasets
import torch
from torch.nn import functional

from exitserve.policy import ExitPolicy
from exitserve.reference import Reference, load_reference

PROMPT_TOKENS = 32
"""Of each window, run at full depth and not counted."""


@dataclass
class Totals:
    """Sums over the counted tokens of all windows, for one policy."""

    depths: list[int] = field(default_factory=list)
    agree: int = 0
    right_exits: int = 0
    nats: float = 0.0

    def add(self, reference: Reference, window: list[int], policy: ExitPolicy) -> None:
        """Adds one window."""
        trace = reference.trace(window[:-1], PROMPT_TOKENS, policy)
        full = reference.trace(window[:-1], PROMPT_TOKENS, ExitPolicy.off())
        depth = trace.depth[PROMPT_TOKENS:]
        equal = (trace.token == full.token)[PROMPT_TOKENS:]
        target = torch.tensor(window[PROMPT_TOKENS + 1 :])
        loss = functional.cross_entropy(trace.logits[PROMPT_TOKENS:], target, reduction="sum")
        self.depths += depth.tolist()
        self.agree += int(equal.sum())
        self.right_exits += int(equal[depth < reference.parts.num_layers].sum())
        self.nats += float(loss)

    def row(self, label: str, layers: list[int]) -> str:
        """One line of the table."""
        count, full = len(self.depths), layers[-1]
        exited = sum(depth < full for depth in self.depths)
        stops = " / ".join(f"{self.depths.count(layer) / count:.0%}" for layer in layers)
        right = f"{self.right_exits / exited:.3f}" if exited else "-"
        speedup = full * count / sum(self.depths)
        perplexity = torch.tensor(self.nats / count).exp().item()
        return (
            f"| {label} | {exited / count:.1%} | {stops} | {speedup:.2f} | {right} "
            f"| {self.agree / count:.3f} | {perplexity:.1f} |"
        )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("dataset")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--thresholds", default="0.3,0.4,0.5,0.6,0.7,0.8,0.9,1")
    args = parser.parse_args()
    reference = load_reference(args.model, exit_rows="all")
    held_out = datasets.load_from_disk(args.dataset)["validation"]
    windows = held_out.select(range(min(args.windows, len(held_out))))["input_ids"]
    layers = [*reference.exit_layers, reference.parts.num_layers]
    stops = " / ".join(map(str, layers))
    print(
        f"| threshold | exited | stopped at {stops} | depth speedup | right among exited "
        "| agreement | perplexity |\n|---|---|---|---|---|---|---|"
    )
    for threshold in map(float, args.thresholds.split(",")):
        totals = Totals()
        for window in windows:
            totals.add(reference, list(window), ExitPolicy.confidence(threshold))
        print(totals.row(f"{threshold:g}", layers), flush=True)
    for layer in reference.exit_layers:
        totals = Totals()
        for window in windows:
            totals.add(reference, list(window), ExitPolicy.fixed(layer))
        print(totals.row(f"layer {layer}", layers), flush=True)


if __name__ == "__main__":
    main()
