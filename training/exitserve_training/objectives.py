"""Objectives: hidden states, labels and the classifier in; a scalar and named metrics out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from exitserve_training.losses import layer_cross_entropy, layer_weights
from exitserve_training.losses.chunked import Classifier
from exitserve_training.losses.weights import counted_layers


class Objective(Protocol):
    """What the trainer minimises."""

    name: str

    def layers(self, step: int) -> tuple[int, ...]:
        """Depths whose hidden states this optimizer step needs, ascending."""
        ...

    def __call__(
        self, step: int, hidden: Mapping[int, Tensor], classifier: Classifier, labels: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss (scalar) and detached metrics by name.

        Args:
            step: the optimizer step, from 0.
            hidden: layer to un-normed hidden states [B, T, D].
            classifier: maps [N, D] to [N, V].
            labels: targets [B, T], already shifted; -100 is ignored.
        """
        ...


@dataclass
class PlainCrossEntropy:
    """Next-token cross-entropy of the last layer alone: ordinary training."""

    num_layers: int
    name: str = "ce"

    def layers(self, step: int) -> tuple[int, ...]:
        """The last layer."""
        return (self.num_layers,)

    def __call__(
        self, step: int, hidden: Mapping[int, Tensor], classifier: Classifier, labels: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Objective`."""
        last = {layer: hidden[layer] for layer in self.layers(step)}
        loss = layer_cross_entropy(last, classifier, labels)[self.num_layers]
        return loss, {f"loss_layer_{self.num_layers}": loss.detach(), "ce_loss": loss.detach()}


@dataclass
class Aligned:
    """The aligned loss (aligned-training paper, eq. 3) at the chosen exit layers.

    Minimising it alone costs the last layer some quality, so with `alternate` (the default, and
    what the paper's appendix C does) every second optimizer step, beginning with the second,
    minimises the last layer's plain cross-entropy instead.
    """

    num_layers: int
    exit_layers: Sequence[int] | None = None
    weights: str | Sequence[float] = "linear"
    alternate: bool = True
    name: str = "aligned"
    _counted: tuple[int, ...] = field(init=False, repr=False)
    _scale: list[float] = field(init=False, repr=False)
    _plain: PlainCrossEntropy = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Fixes the counted layers and their weights; raises `ExitServeError` as they do."""
        self._counted = counted_layers(self.num_layers, self.exit_layers)
        self._scale = layer_weights(self._counted, self.weights)
        self._plain = PlainCrossEntropy(self.num_layers)

    def layers(self, step: int) -> tuple[int, ...]:
        """All counted layers on an aligned step, the last layer on a plain one."""
        return (self.num_layers,) if self._is_plain(step) else self._counted

    def __call__(
        self, step: int, hidden: Mapping[int, Tensor], classifier: Classifier, labels: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Objective`."""
        if self._is_plain(step):
            return self._plain(step, hidden, classifier, labels)
        counted = {layer: hidden[layer] for layer in self._counted}
        losses = layer_cross_entropy(counted, classifier, labels)
        pairs = zip(self._counted, self._scale, strict=True)
        loss = torch.stack([weight * losses[layer] for layer, weight in pairs]).sum()
        metrics = {f"loss_layer_{layer}": value.detach() for layer, value in losses.items()}
        return loss, {**metrics, "aligned_loss": loss.detach()}

    def _is_plain(self, step: int) -> bool:
        return self.alternate and step % 2 == 1
