"""Objectives that spread the states of a sequence, averaged over their layers.

The paper aggregates "across all layers" without saying how; the mean keeps lambda's meaning
whatever the depth. Added to a main loss.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from exitserve_training import losses
from exitserve_training.objectives.dispersion.options import (
    DecorrelationOptions,
    DispersionOptions,
    L2RepelOptions,
    OrthogonalizationOptions,
    SeveralLayersOptions,
)
from exitserve_training.objectives.objective import LossInputs, Metrics, Objective
from exitserve_training.objectives.options import BuildContext

Options = TypeVar("Options", bound=SeveralLayersOptions)


class _SeveralLayers(Objective, Generic[Options]):
    """The mean loss of the layers.

    Logs the mean cosine of the deepest of them, the paper's measure of condensation.
    """

    def __init__(self, options: Options, context: BuildContext) -> None:
        super().__init__(options.name, options.weight)
        self.options = options
        self.chosen = options.layers_used(context.exit_layers, context.num_layers)

    def layers(self, step: int) -> Sequence[int]:
        """See `Objective`."""
        return self.chosen

    def forward(self, batch: LossInputs) -> tuple[Tensor, Metrics]:
        """See `Objective`."""
        found = [self.loss(batch.hidden[layer], batch.reached(layer)) for layer in self.chosen]
        loss = torch.stack(found).mean()
        last = self.chosen[-1]
        with torch.no_grad():
            cosine = losses.mean_cosine(batch.hidden[last], mask=batch.reached(last))
        return loss, {f"{self.name}_loss": loss.detach(), "mean_cosine": cosine}

    @abstractmethod
    def loss(self, states: Tensor, mask: Tensor) -> Tensor:
        """The loss of one layer's states [B, T, D]."""


class Dispersion(_SeveralLayers[DispersionOptions]):
    """See `losses.dispersion`."""

    def loss(self, states: Tensor, mask: Tensor) -> Tensor:
        """See `_SeveralLayers`."""
        return losses.dispersion(states, temperature=self.options.temperature, mask=mask)


class Decorrelation(_SeveralLayers[DecorrelationOptions]):
    """See `losses.decorrelation`."""

    def loss(self, states: Tensor, mask: Tensor) -> Tensor:
        """See `_SeveralLayers`."""
        return losses.decorrelation(states, between=self.options.between, mask=mask)


class L2Repel(_SeveralLayers[L2RepelOptions]):
    """See `losses.l2_repel`."""

    def loss(self, states: Tensor, mask: Tensor) -> Tensor:
        """See `_SeveralLayers`."""
        options = self.options
        return losses.l2_repel(
            states,
            temperature=options.temperature,
            norm_weight=options.norm_weight,
            self_pairs=options.self_pairs,
            mask=mask,
        )


class Orthogonalization(_SeveralLayers[OrthogonalizationOptions]):
    """See `losses.orthogonalization`."""

    def loss(self, states: Tensor, mask: Tensor) -> Tensor:
        """See `_SeveralLayers`."""
        return losses.orthogonalization(states, margin=self.options.margin, mask=mask)
