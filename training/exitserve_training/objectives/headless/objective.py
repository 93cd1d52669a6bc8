"""The headless objective: contrastive weight tying (section 3.2)."""

from torch import Tensor

from exitserve_training.losses import contrastive_weight_tying
from exitserve_training.objectives.objective import LossInputs, Metrics, Objective


class Headless(Objective):
    """Contrastive weight tying: the last layer against the input embeddings of the targets.

    No head runs. The negatives are the targets of the micro-batch on this process.
    """

    def forward(self, batch: LossInputs) -> tuple[Tensor, Metrics]:
        """See `Objective`."""
        labelled = batch.counted(self.num_layers)
        outputs = batch.norm(batch.hidden[self.num_layers])[labelled]
        loss = contrastive_weight_tying(outputs, batch.embed(batch.labels[labelled]))
        return loss, {"headless_loss": loss.detach()}
