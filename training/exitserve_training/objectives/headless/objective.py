"""The headless objective: contrastive weight tying (section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exitserve_training.losses import contrastive_weight_tying
from exitserve_training.losses.tokens import IGNORED
from exitserve_training.objectives.headless.options import HeadlessOptions
from exitserve_training.objectives.objective import LossInputs, Metrics, Objective
from exitserve_training.objectives.options import BuildContext

RANKED = 256
"""Evaluation ranks the right token among all V at so many positions of a batch."""


class Headless(Objective):
    """Contrastive weight tying: the last layer against the input embeddings of the targets.

    No head runs. The negatives are the targets of the micro-batch on this process.
    """

    def __init__(self, options: HeadlessOptions, context: BuildContext) -> None:
        super().__init__(options.name, options.weight)
        self.options = options
        self.num_layers = context.num_layers

    def layers(self, step: int) -> Sequence[int]:
        """The last layer."""
        return (self.num_layers,)

    def forward(self, batch: LossInputs) -> tuple[Tensor, Metrics]:
        """See `Objective`; in evaluation also how high the right token ranks."""
        labelled = batch.reached(self.num_layers) & (batch.labels != IGNORED)
        targets = batch.labels[labelled]
        outputs = batch.state(self.num_layers, normed=True)[labelled]
        loss = contrastive_weight_tying(
            outputs,
            batch.embed(targets),
            target_ids=targets if self.options.mask_repeated else None,
        )
        metrics = {"headless_loss": loss.detach()}
        if not self.training:
            metrics |= self._ranks(batch, outputs[:RANKED], targets[:RANKED])
        return loss, metrics

    def _ranks(self, batch: LossInputs, outputs: Tensor, targets: Tensor) -> Metrics:
        """Mean reciprocal rank of the right token, read through the input embeddings."""
        if not targets.numel():
            return {}
        scores = outputs.float() @ self._vocabulary(batch).float().T
        right = scores.gather(1, targets[:, None])
        rank = (scores > right).sum(1) + 1
        return {"reciprocal_rank": (1.0 / rank).mean(), "median_rank": rank.float().median()}

    @torch.no_grad()
    def _vocabulary(self, batch: LossInputs) -> Tensor:
        """Input embeddings of all tokens [V, D]."""
        return batch.embed(torch.arange(batch.vocab_size, device=batch.labels.device))
