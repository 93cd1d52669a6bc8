"""The base class of objectives, and what it is given.

Shapes: B rows, T tokens, L layers, D hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from exitserve_training import losses
from exitserve_training.losses import OutputHead
from exitserve_training.losses.head import Classifier
from exitserve_training.losses.tokens import IGNORED
from exitserve_training.objectives.options import BuildContext, ObjectiveOptions

Metrics = dict[str, Tensor]
"""Detached scalars by name."""


@dataclass(frozen=True)
class LossInputs:
    """What objectives read of one forward pass."""

    step: int
    """The optimizer step, from 0."""
    hidden: Mapping[int, Tensor]
    """Depth to un-normed hidden states [B, T, D]; those that `Objective.layers` names."""
    labels: Tensor
    """[B, T], the target of each position; -100 where there is none."""
    mask: Tensor
    """Bool [B, T]: tokens, as opposed to padding."""
    classifier: OutputHead
    """The shared norm and head: [N, D] to [N, V]."""
    norm: Callable[[Tensor], Tensor]
    """The final norm, [..., D] to [..., D]."""
    embed: Callable[[Tensor], Tensor]
    """Token ids [...] to input embeddings [..., D]."""
    depth: Tensor | None = None
    """[B, T]: the depth at which a position was frozen, L where it was not; None: nowhere."""
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """What the model's body was given: `input_ids` and the like."""

    def reached(self, layer: int) -> Tensor:
        """Bool [B, T]: tokens that have a state of their own at `layer`, not a frozen one."""
        return self.mask if self.depth is None else self.mask & (self.depth >= layer)

    @cached_property
    def labelled(self) -> Tensor:
        """Bool [B, T]: positions with a label."""
        return self.labels != IGNORED

    def counted(self, layer: int) -> Tensor:
        """Bool [B, T]: positions with a label and a state of their own at `layer`."""
        return self.labelled if self.depth is None else self.labelled & self.reached(layer)


class Objective(nn.Module, ABC):
    """One loss: hidden states, labels and head in; a scalar and named metrics out.

    A module, because some have parameters (NITP's projector, separate heads), which are trained
    with the model and are not part of the served checkpoint.
    """

    in_evaluation = True
    """Whether evaluation reports it; the per-layer cross-entropies are reported anyway."""
    suffix = ""
    """Of its metrics' names: `_2` of the second objective of a name."""

    def __init__(self, options: ObjectiveOptions, context: BuildContext) -> None:
        """Takes what the recipe says of it, and what it is built for."""
        super().__init__()
        self.name, self.weight = options.name, options.weight_for(context.hidden_size)
        self.num_layers = context.num_layers
        self.chosen = options.layers_used(context.exit_layers, context.num_layers)

    def layers(self, step: int) -> Sequence[int]:
        """Depths whose hidden states it needs in this optimizer step."""
        return self.chosen

    @abstractmethod
    def forward(self, batch: LossInputs) -> tuple[Tensor, Metrics]:
        """Returns the unweighted loss (scalar) and what to log."""

    def classifiers(self) -> Mapping[int, Classifier]:
        """Heads by depth, where evaluation must not use the shared one."""
        return {}


class MeanOfLayers(Objective):
    """The mean over layers of the function of `losses` of the objective's name."""

    def __init__(self, options: ObjectiveOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.function: Callable[..., Tensor] = getattr(losses, self.name)
        self.arguments = options.loss_arguments()

    @abstractmethod
    def of_layer(self, batch: LossInputs, layer: int) -> Tensor:
        """The loss of one layer (scalar)."""

    def forward(self, batch: LossInputs) -> tuple[Tensor, Metrics]:
        """See `Objective`."""
        loss = torch.stack([self.of_layer(batch, layer) for layer in self.chosen]).mean()
        return loss, {f"{self.name}_loss": loss.detach()}
