"""SimReg (eq. 3) and its baselines on one layer, the last by default (section 5.3).

Added to a main loss.
"""

from torch import Tensor
from torch.nn import functional

from exitserve_training import losses
from exitserve_training.objectives.objective import LossInputs, Metrics, Objective
from exitserve_training.objectives.options import BuildContext
from exitserve_training.objectives.simreg.options import OneLayerOptions


class OneLayer(Objective):
    """The function of `losses` of the objective's name, of one layer's states and the next tokens.

    States are taken behind the final norm, as the LM head reads them. A loss of two views has the
    states under dropout as the second; no second pass is made.
    """

    def __init__(self, options: OneLayerOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        (self.layer,) = self.chosen
        self.arguments = options.loss_arguments()
        self.dropout: float | None = self.arguments.pop("dropout", None)

    def forward(self, batch: LossInputs) -> tuple[Tensor, Metrics]:
        """See `Objective`."""
        states = batch.norm(batch.hidden[self.layer])
        views = {}
        if self.dropout is not None:
            views["views"] = functional.dropout(states, self.dropout, self.training)
        loss: Tensor = getattr(losses, self.name)(
            states, batch.labels, mask=batch.reached(self.layer), **views, **self.arguments
        )
        return loss, {f"{self.name}_loss": loss.detach()}
