"""Objectives that shape where hidden states lie: SimReg, its baselines, the dispersion losses.

Added to a main loss. SimReg acts on the last layer (its section 5.3), dispersion on all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from exitserve_training import losses
from exitserve_training.objective_options import (
    CPretrainOptions,
    CRegOptions,
    DecorrelationOptions,
    DispersionOptions,
    L2RepelOptions,
    OrthogonalizationOptions,
    SCEOptions,
    SimCSEOptions,
    SimRegOptions,
)
from exitserve_training.objectives.base import Batch, Metrics, Objective

SimilarityOptions = SimRegOptions | SimCSEOptions | CPretrainOptions | CRegOptions | SCEOptions
SpreadOptions = DispersionOptions | DecorrelationOptions | L2RepelOptions | OrthogonalizationOptions


class Similarity(Objective):
    """SimReg (eq. 3), or one of the losses that its table 1 compares it with, on one layer."""

    def __init__(self, options: SimilarityOptions, layer: int, hidden_size: int) -> None:
        weight = options.weight
        auto = losses.simreg_weight(hidden_size) if weight == "auto" else weight
        super().__init__(options.name, float(auto))
        self.options = options
        self.layer = layer

    def layers(self, step: int) -> Sequence[int]:
        """The one that is regularised."""
        return (self.layer,)

    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """See `Objective`."""
        states = batch.state(self.layer, self.options.normed)
        loss = self._loss(states, batch.labels, batch.reached(self.layer))
        return loss, {f"{self.name}_loss": loss.detach()}

    def _loss(self, states: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        options = self.options
        match options:
            case SimRegOptions():
                return losses.simreg(
                    states,
                    labels,
                    temperature=options.temperature,
                    similarity=options.similarity,
                    grouping=options.grouping,
                    chunk_size=options.chunk_size,
                    chunk_weights=options.chunk_weights,
                    mask=mask,
                )
            case SimCSEOptions():
                return losses.simcse(
                    states,
                    labels,
                    views=functional.dropout(states, options.dropout, self.training),
                    level=options.level,
                    temperature=options.temperature,
                    mask=mask,
                )
            case SCEOptions():
                return losses.sce(
                    states,
                    labels,
                    views=functional.dropout(states, options.dropout, self.training),
                    contrast=options.contrast,
                    temperature=options.temperature,
                    target_temperature=options.target_temperature,
                    mask=mask,
                )
            case CPretrainOptions():
                return losses.cpretrain(states, labels, temperature=options.temperature, mask=mask)
            case CRegOptions():
                return losses.creg(states, labels, temperature=options.temperature, mask=mask)


class Spread(Objective):
    """Dispersion, or one of its alternatives (table 1), averaged over its layers.

    The paper aggregates "across all layers" without saying how; the mean keeps lambda's meaning
    whatever the depth. Logs the mean cosine of the last of its layers, the paper's measure of
    condensation.
    """

    def __init__(self, options: SpreadOptions, layers: Sequence[int]) -> None:
        super().__init__(options.name, options.weight)
        self.options = options
        self.chosen = tuple(layers)

    def layers(self, step: int) -> Sequence[int]:
        """Those that are spread."""
        return self.chosen

    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """See `Objective`."""
        parts = [self._loss(batch.hidden[layer], batch.reached(layer)) for layer in self.chosen]
        loss = torch.stack(parts).mean()
        last = self.chosen[-1]
        with torch.no_grad():
            cosine = losses.mean_cosine(batch.hidden[last], mask=batch.reached(last))
        return loss, {f"{self.name}_loss": loss.detach(), "mean_cosine": cosine}

    def _loss(self, states: Tensor, mask: Tensor) -> Tensor:
        options = self.options
        match options:
            case DispersionOptions():
                return losses.dispersion(states, temperature=options.temperature, mask=mask)
            case DecorrelationOptions():
                return losses.decorrelation(states, mask=mask)
            case L2RepelOptions():
                return losses.l2_repel(
                    states,
                    temperature=options.temperature,
                    norm_weight=options.norm_weight,
                    mask=mask,
                )
            case OrthogonalizationOptions():
                return losses.orthogonalization(states, margin=options.margin, mask=mask)
