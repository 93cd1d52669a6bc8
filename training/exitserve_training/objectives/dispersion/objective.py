"""Objectives that spread the states of a sequence. Added to a main loss.

The paper aggregates "across all layers" without saying how; the mean keeps lambda's meaning
whatever the depth.
"""

import torch
from torch import Tensor

from exitserve_training import losses
from exitserve_training.objectives.objective import LossInputs, MeanOfLayers, Metrics


class Spread(MeanOfLayers):
    """Of each layer's states, as they leave it.

    Logs the mean cosine of the deepest of them, the paper's measure of condensation.
    """

    def of_layer(self, batch: LossInputs, layer: int) -> Tensor:
        """See `MeanOfLayers`."""
        return self.function(batch.hidden[layer], mask=batch.reached(layer), **self.arguments)

    def forward(self, batch: LossInputs) -> tuple[Tensor, Metrics]:
        """See `Objective`."""
        loss, metrics = super().forward(batch)
        last = self.chosen[-1]
        with torch.no_grad():
            cosine = losses.mean_cosine(batch.hidden[last], mask=batch.reached(last))
        return loss, {**metrics, "mean_cosine": cosine}
