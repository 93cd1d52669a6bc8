"""Objectives that spread the states of a sequence, averaged over their layers.

The paper aggregates "across all layers" without saying how; the mean keeps lambda's meaning
whatever the depth. Added to a main loss.
"""

import torch
from torch import Tensor

from exitserve_training import losses
from exitserve_training.objectives.dispersion.options import SeveralLayersOptions
from exitserve_training.objectives.objective import LossInputs, Metrics, Objective
from exitserve_training.objectives.options import BuildContext


class SeveralLayers(Objective):
    """The mean over layers of the function of `losses` of the objective's name.

    Logs the mean cosine of the deepest of them, the paper's measure of condensation.
    """

    def __init__(self, options: SeveralLayersOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.arguments = options.loss_arguments()

    def forward(self, batch: LossInputs) -> tuple[Tensor, Metrics]:
        """See `Objective`."""
        function = getattr(losses, self.name)
        found = [
            function(batch.hidden[layer], mask=batch.reached(layer), **self.arguments)
            for layer in self.chosen
        ]
        loss = torch.stack(found).mean()
        last = self.chosen[-1]
        with torch.no_grad():
            cosine = losses.mean_cosine(batch.hidden[last], mask=batch.reached(last))
        return loss, {f"{self.name}_loss": loss.detach(), "mean_cosine": cosine}
