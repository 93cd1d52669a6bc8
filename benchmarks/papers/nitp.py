"""NITP's claims, on small decoders trained here.

    python benchmarks/papers/nitp.py targets --data NOVELS/*.txt

What the last layer is to predict, and how that is measured (its ablation study), with the
effective rank of the states. Three seeds a variant; results go to docs/papers/results.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import measures
from decoders import decoder
from study import Run, Study, seeds_of, study_command
from torch import Tensor
from torch.nn import functional

from exitserve_training.objectives.nitp.objective import NITP
from exitserve_training.objectives.nitp.options import NITPOptions
from exitserve_training.objectives.objective import LossInputs, Metrics
from exitserve_training.objectives.registry import OBJECTIVES


class DistanceOptions(NITPOptions):
    """NITP with a distance that the paper names, and recipes do not have."""

    implementation = "nitp:Distance"

    name: Literal["nitp_distance"] = "nitp_distance"  # type: ignore[assignment]
    distance: Literal["smooth_l1", "kl"]  # type: ignore[assignment]


OBJECTIVES["nitp_distance"] = DistanceOptions


def divergence(predicted: Tensor, target: Tensor) -> Tensor:
    """Mean of KL(target | prediction), after a softmax over D of both."""
    ours, theirs = predicted.log_softmax(-1), target.log_softmax(-1)
    return functional.kl_div(ours, theirs, reduction="batchmean", log_target=True)


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "smooth_l1": functional.smooth_l1_loss,
    "kl": divergence,
}
"""Of predictions and targets [N, D]."""


class Distance(NITP):
    """NITP with one of `DISTANCES`."""

    def forward(self, batch: LossInputs) -> tuple[Tensor, Metrics]:
        """See `Objective`."""
        mask = batch.reached(self.num_layers)
        counted = mask[:, :-1] & mask[:, 1:]
        last = batch.norm(batch.hidden[self.num_layers])
        predicted = self.projector(last[:, :-1][counted])
        target = batch.hidden[self.target_layer].detach()[:, 1:][counted]
        loss = DISTANCES[self.options.distance](predicted, target)
        return loss, {f"{self.name}_loss": loss.detach()}


VARIANTS: dict[str, list[Any]] = {
    "plain": ["ce"],
    "shallow target (layer 1)": ["ce", {"name": "nitp", "target_layer": 1}],
    "middle target (layer 3)": ["ce", {"name": "nitp", "target_layer": 3}],
    "deep target (layer 4)": ["ce", {"name": "nitp", "target_layer": 4}],
    "same position (t to t)": ["ce", {"name": "nitp", "target_shift": 0}],
    "mean squared error": ["ce", {"name": "nitp", "distance": "mse"}],
    "smooth L1": ["ce", {"name": "nitp_distance", "distance": "smooth_l1"}],
    "KL divergence": ["ce", {"name": "nitp_distance", "distance": "kl"}],
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
