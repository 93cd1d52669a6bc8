"""What the options of all objectives share. Imports no torch, so that recipes check at once."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from exitserve.errors import ExitServeError
from exitserve_training.layer_weights import counted_layers
from exitserve_training.strict import Listed, Strict

if TYPE_CHECKING:
    from exitserve_training.losses import OutputHead
    from exitserve_training.objectives.objective import Objective

Layers = Literal["exits", "all", "last"] | Annotated[list[int], Listed]
"""Depths: the recipe's exit layers (and the last), every layer, the last alone, or a list."""


@dataclass(frozen=True)
class BuildContext:
    """What an objective is built for."""

    exit_layers: Sequence[int]
    """The recipe's, below the last."""
    num_layers: int
    hidden_size: int
    head: OutputHead
    """The model's norm and head."""
    seed: int
    """Of everything drawn."""
    initial_model: str | None = None
    """Directory or hub id that the run began from; None from scratch."""
    bf16: bool = False
    """Whether products are computed in bfloat16: what does not learn is kept so, too."""
    compile_layers: bool = False
    """Whether layers are compiled, those that do not learn too."""


class ObjectiveOptions(Strict):
    """The options of one objective in a recipe, and the facts about it that others need.

    A subclass sets `implementation`, `name` (a `Literal` with that default) and its own options,
    and overrides the facts that differ.
    """

    implementation: ClassVar[str]
    """`module:Class` of the `Objective`, which takes these options and a `BuildContext`."""
    is_main: ClassVar[bool] = False
    """Whether it trains the model for its task; other objectives are added to one that does."""
    trains_head: ClassVar[bool] = False
    """Whether its gradient reaches the output head."""
    for_classifiers: ClassVar[bool] = False
    """Whether a classifier, with one class for a whole input, can be trained with it."""
    classifier_fields: ClassVar[frozenset[str]] = frozenset()
    """Options that only classifiers can set."""
    excludes: ClassVar[Mapping[str, str]] = {}
    """Names of objectives that it cannot be trained with, and why."""

    name: str
    weight: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """Multiplies the loss; 0 measures and logs it without training on it."""

    @property
    def is_enough(self) -> bool:
        """Whether, as given, it trains the model for its task, without another objective."""
        return self.is_main

    def layers_used(self, exit_layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
        """The depths that it reads, ascending; by default the last.

        Raises:
            ExitServeError: a layer or a weight does not fit the model.
        """
        return (num_layers,)

    def weight_for(self, hidden_size: int) -> float:
        """What multiplies the loss, as a number."""
        return self.weight

    def loss_arguments(self) -> dict[str, Any]:
        """The loss's own options."""
        return self.model_dump(exclude={"name", "weight", "layers"})

    def build(self, context: BuildContext) -> Objective:
        """The objective itself; its module is imported here, because it imports torch."""
        module, _, name = self.implementation.partition(":")
        objective: Objective = getattr(importlib.import_module(module), name)(self, context)
        return objective

    def _depths(
        self, layers: Layers, exit_layers: Sequence[int], num_layers: int
    ) -> tuple[int, ...]:
        """The depths that `layers` stands for, ascending, checked."""
        if layers == "last":
            return (num_layers,)
        if layers == "exits":
            return counted_layers(num_layers, exit_layers)
        if layers == "all":
            return counted_layers(num_layers, None)
        if not layers:
            raise ExitServeError(f"objective {self.name!r}: layers is empty; name at least one.")
        return tuple(sorted({self._depth(layer, num_layers) for layer in layers}))

    def _depth(self, layer: int, num_layers: int) -> int:
        """`layer`, checked."""
        if not 1 <= layer <= num_layers:
            raise ExitServeError(
                f"objective {self.name!r}: layer {layer} is out of range; the model has "
                f"{num_layers} layers, so choose from 1..{num_layers}."
            )
        return layer


class SeveralLayersOptions(ObjectiveOptions):
    """Of a loss that is the mean over layers."""

    layers: Layers
    """The loss is the mean over these layers."""

    def layers_used(self, exit_layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
        """See `ObjectiveOptions`."""
        return self._depths(self.layers, exit_layers, num_layers)
