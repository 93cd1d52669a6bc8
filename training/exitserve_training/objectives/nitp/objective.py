"""The NITP objective: predicts a shallow state of the next position. Added to a main loss."""

from torch import Tensor, nn

from exitserve_training.losses import Projector, effective_rank, nitp
from exitserve_training.objectives.nitp.options import NITPOptions
from exitserve_training.objectives.objective import LossInputs, Metrics, Objective
from exitserve_training.objectives.options import BuildContext


class NITP(Objective):
    """The last layer's state, projected, against the next position's shallow state."""

    def __init__(self, options: NITPOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.options = options
        self.target_layer = self.chosen[0]
        self.projector = Projector(context.hidden_size) if options.project else nn.Identity()

    def forward(self, batch: LossInputs) -> tuple[Tensor, Metrics]:
        """See `Objective`; in evaluation also the effective rank of the last layer."""
        last = batch.norm(batch.hidden[self.num_layers])
        loss = nitp(
            last,
            batch.hidden[self.target_layer],
            self.projector,
            target_shift=self.options.target_shift,
            distance=self.options.distance,
            mask=batch.reached(self.num_layers),
        )
        metrics = {"nitp_loss": loss.detach()}
        if not self.training:
            rank = effective_rank(last.float(), mask=batch.reached(self.num_layers))
            metrics["effective_rank"] = rank
        return loss, metrics
