"""Aligned training combined with the other papers' objectives, on small decoders trained here.

    python benchmarks/papers/combined.py --data NOVELS/*.txt [--seeds 3]

What the combinations do to exits: agreement with the last layer by depth and depth speedup, along
training, so that variants can be compared at equal steps and at equal loss of the last layer. The
last two files are held out. Results go to docs/papers/results.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import measures
from decoders import Recipe, decoder
from study import Run, Study, seeds_of

STEPS = 240
SAVED = 40
"""A checkpoint each so many steps is measured."""
SIMREG = {"name": "simreg", "temperature": 0.01, "weight": 0.3}
"""The weight that gains at this size (simreg.py)."""
VARIANTS: dict[str, list[Any]] = {
    "aligned": ["aligned"],
    "+ SimReg, last layer": ["aligned", SIMREG],
    "+ SimReg, exits": ["aligned", {**SIMREG, "layers": "exits"}],
    "+ NITP": ["aligned", "nitp"],
    "+ dispersion": ["aligned", "dispersion"],
    "+ decorrelation": ["aligned", "decorrelation"],
}
"""Weights are the papers' where nothing is said."""


def combined(novels: list[str], seeds: int) -> Study:
    """Aligned training alone, and with each other objective."""

    def measure(folder: Path) -> dict[str, Any]:
        along = {
            str(step): measures.exits_of_texts(folder / f"checkpoint-{step}", novels[-2:])
            for step in range(SAVED, STEPS + 1, SAVED)
        }
        return {"along": along}

    return Study(
        "combined",
        [
            Run(variant, seed, _recipe(novels, objectives), measure)
            for seed, variant, objectives in seeds_of(VARIANTS, seeds)
        ],
    )


def _recipe(novels: list[str], objectives: list[Any]) -> Recipe:
    """At a constant rate, so that checkpoints along training differ in nothing but their steps."""
    recipe = decoder(novels, objectives)
    training = {
        "max_steps": STEPS,
        "warmup_steps": STEPS // 10,
        "lr_scheduler_type": "constant_with_warmup",
        "eval_strategy": "no",
        "save_strategy": "steps",
        "save_steps": SAVED,
        "save_total_limit": STEPS // SAVED,
    }
    return {
        **recipe,
        "data": {**recipe["data"], "validation_blocks": 8},
        "exit_layers": "all",
        "training": {**recipe["training"], **training},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", required=True, metavar="TEXT")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    combined(args.data, args.seeds).go_on()
