"""SimReg (eq. 3) and its baselines on one layer, the last by default (section 5.3).

Added to a main loss.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from torch import Tensor
from torch.nn import functional

from exitserve_training import losses
from exitserve_training.objectives.objective import LossInputs, Metrics, Objective
from exitserve_training.objectives.options import BuildContext
from exitserve_training.objectives.simreg.options import (
    CPretrainOptions,
    CRegOptions,
    OneLayerOptions,
    SCEOptions,
    SimCSEOptions,
    SimRegOptions,
)

Options = TypeVar("Options", bound=OneLayerOptions)


class _OneLayer(Objective, Generic[Options]):
    """A loss of one layer's states and of the next tokens."""

    def __init__(self, options: Options, context: BuildContext) -> None:
        super().__init__(options.name, self.resolved_weight(options, context.hidden_size))
        self.options = options
        (self.layer,) = options.layers_used(context.exit_layers, context.num_layers)

    @staticmethod
    def resolved_weight(options: Options, hidden_size: int) -> float:
        """What multiplies the loss, as a number."""
        return options.weight

    def layers(self, step: int) -> Sequence[int]:
        """See `Objective`."""
        return (self.layer,)

    def forward(self, batch: LossInputs) -> tuple[Tensor, Metrics]:
        """See `Objective`."""
        states = batch.state(self.layer, self.options.normed)
        loss = self.loss(states, batch.labels, batch.reached(self.layer))
        return loss, {f"{self.name}_loss": loss.detach()}

    @abstractmethod
    def loss(self, states: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        """The loss of states [B, T, D] with labels and mask [B, T]."""


class SimReg(_OneLayer[SimRegOptions]):
    """See `losses.simreg`."""

    @staticmethod
    def resolved_weight(options: SimRegOptions, hidden_size: int) -> float:
        """See `_OneLayer`."""
        if options.weight == "auto":
            return losses.simreg_weight(hidden_size)
        return options.weight

    def loss(self, states: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        """See `_OneLayer`."""
        return losses.simreg(
            states,
            labels,
            temperature=self.options.temperature,
            similarity=self.options.similarity,
            grouping=self.options.grouping,
            chunk_size=self.options.chunk_size,
            chunk_weights=self.options.chunk_weights,
            mask=mask,
        )


class SimCSE(_OneLayer[SimCSEOptions]):
    """See `losses.simcse`."""

    def loss(self, states: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        """See `_OneLayer`."""
        return losses.simcse(
            states,
            labels,
            views=functional.dropout(states, self.options.dropout, self.training),
            level=self.options.level,
            temperature=self.options.temperature,
            mask=mask,
        )


class SCE(_OneLayer[SCEOptions]):
    """See `losses.sce`."""

    def loss(self, states: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        """See `_OneLayer`."""
        return losses.sce(
            states,
            labels,
            views=functional.dropout(states, self.options.dropout, self.training),
            contrast=self.options.contrast,
            temperature=self.options.temperature,
            target_temperature=self.options.target_temperature,
            mask=mask,
        )


class CPretrain(_OneLayer[CPretrainOptions]):
    """See `losses.cpretrain`."""

    def loss(self, states: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        """See `_OneLayer`."""
        return losses.cpretrain(states, labels, temperature=self.options.temperature, mask=mask)


class CReg(_OneLayer[CRegOptions]):
    """See `losses.creg`."""

    def loss(self, states: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        """See `_OneLayer`."""
        return losses.creg(states, labels, temperature=self.options.temperature, mask=mask)
