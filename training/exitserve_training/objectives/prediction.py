"""Objectives that predict something other than the next token's id: NITP and headless training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from exitserve_training.losses import Projector, contrastive_weight_tying, effective_rank, nitp
from exitserve_training.losses.chunked import IGNORED
from exitserve_training.objective_options import HeadlessOptions, NITPOptions
from exitserve_training.objectives.base import Batch, Metrics, Objective

RANKED = 256
"""Evaluation ranks the right token among all V at so many positions of a batch."""


class NextImplicitToken(Objective):
    """NITP: the last layer's state, projected, against the next position's shallow state."""

    def __init__(
        self, options: NITPOptions, target_layer: int, num_layers: int, hidden_size: int
    ) -> None:
        super().__init__(options.name, options.weight)
        self.options = options
        self.target_layer = target_layer
        self.num_layers = num_layers
        self.projector = Projector(hidden_size, options.width) if options.project else nn.Identity()

    def layers(self, step: int) -> Sequence[int]:
        """The shallow target and the last layer."""
        return (self.target_layer, self.num_layers)

    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """See `Objective`; in evaluation also the effective rank of the last layer."""
        last = batch.state(self.num_layers, self.options.normed)
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


class Headless(Objective):
    """Contrastive weight tying: the last layer against the input embeddings of the targets.

    No head runs. The negatives are the targets of the micro-batch on this process.
    """

    def __init__(self, options: HeadlessOptions, num_layers: int) -> None:
        super().__init__(options.name, options.weight)
        self.options = options
        self.num_layers = num_layers

    def layers(self, step: int) -> Sequence[int]:
        """The last layer."""
        return (self.num_layers,)

    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """See `Objective`; in evaluation also how high the right token ranks."""
        spoken = batch.reached(self.num_layers) & (batch.labels != IGNORED)
        targets = batch.labels[spoken]
        outputs = batch.state(self.num_layers, normed=True)[spoken]
        loss = contrastive_weight_tying(
            outputs,
            batch.embed(targets),
            target_ids=targets if self.options.mask_repeated else None,
        )
        metrics = {"headless_loss": loss.detach()}
        if not self.training:
            metrics |= self._ranks(batch, outputs[:RANKED], targets[:RANKED])
        return loss, metrics

    def _ranks(self, batch: Batch, outputs: Tensor, targets: Tensor) -> Metrics:
        """Mean reciprocal rank of the right token, read through the input embeddings."""
        if not targets.numel():
            return {}
        scores = outputs.float() @ self._vocabulary(batch).float().T
        right = scores.gather(1, targets[:, None])
        rank = (scores > right).sum(1) + 1
        return {"reciprocal_rank": (1.0 / rank).mean(), "median_rank": rank.float().median()}

    @torch.no_grad()
    def _vocabulary(self, batch: Batch) -> Tensor:
        """Input embeddings of all tokens [V, D]."""
        return batch.embed(torch.arange(batch.vocab_size, device=batch.labels.device))
