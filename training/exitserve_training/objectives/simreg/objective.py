"""SimReg (eq. 3) and its baselines, on the last layer by default (section 5.3).

Added to a main loss.
"""

from torch import Tensor
from torch.nn import functional

from exitserve_training.objectives.objective import LossInputs, MeanOfLayers
from exitserve_training.objectives.options import BuildContext
from exitserve_training.objectives.simreg.options import ContrastOptions


class Contrast(MeanOfLayers):
    """Of each layer's states and the next tokens.

    States are taken behind the final norm, as the LM head reads them. A loss of two views has the
    states under dropout as the second; no second pass is made.
    """

    def __init__(self, options: ContrastOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.dropout: float | None = self.arguments.pop("dropout", None)

    def of_layer(self, batch: LossInputs, layer: int) -> Tensor:
        """See `MeanOfLayers`."""
        states = batch.norm(batch.hidden[layer])
        views = {}
        if self.dropout is not None:
            views["views"] = functional.dropout(states, self.dropout, self.training)
        mask = batch.reached(layer)
        return self.function(states, batch.labels, mask=mask, **views, **self.arguments)
