"""NITP's claims, on small decoders trained here.

    python benchmarks/papers/nitp.py targets --data NOVELS/*.txt

What the last layer is to predict, and how that is measured (its ablation study), with the
effective rank of the states. Three seeds a variant; results go to docs/papers/results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import measures
from decoders import decoder
from study import Run, Study, seeds_of, study_command

VARIANTS: dict[str, list[Any]] = {
    "plain": ["ce"],
    "shallow target (layer 1)": ["ce", {"name": "nitp", "target_layer": 1}],
    "middle target (layer 3)": ["ce", {"name": "nitp", "target_layer": 3}],
    "deep target (layer 4)": ["ce", {"name": "nitp", "target_layer": 4}],
    "same position (t to t)": ["ce", {"name": "nitp", "target_shift": 0}],
    "mean squared error": ["ce", {"name": "nitp", "distance": "mse"}],
    "cosine without prediction": ["ce", {"name": "nitp", "target_shift": 0, "project": False}],
}


def targets(novels: list[str]) -> Study:
    """Every line of the ablation table."""

    def measure(folder: Path) -> dict[str, Any]:
        return {**measures.curve(folder), **measures.spread_of_states(folder, novels[-1:])}

    return Study(
        "nitp-targets",
        [
            Run(variant, seed, decoder(novels, objectives), measure)
            for seed, variant, objectives in seeds_of(VARIANTS)
        ],
    )


if __name__ == "__main__":
    study_command(__doc__, {"targets": targets})
