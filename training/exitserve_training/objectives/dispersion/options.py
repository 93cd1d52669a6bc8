"""Options of the dispersion loss and of its alternatives. Imports no torch."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from exitserve_training.objectives.options import Layers, ObjectiveOptions


class SeveralLayersOptions(ObjectiveOptions):
    """Of a loss that is the mean over layers."""

    implementation = "exitserve_training.objectives.dispersion.objective:SeveralLayers"

    weight: float = Field(default=0.1, ge=0.0, allow_inf_nan=False)
    """The paper's lambda."""
    layers: Layers = "all"
    """The loss is the mean over these layers."""

    def layers_used(self, exit_layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
        """See `ObjectiveOptions`."""
        return self._depths(self.layers, exit_layers, num_layers)


class DispersionOptions(SeveralLayersOptions):
    """States of a sequence spread on the sphere (dispersion loss, table 1, row 1)."""

    name: Literal["dispersion"] = "dispersion"
    temperature: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)


class DecorrelationOptions(SeveralLayersOptions):
    """States of a sequence decorrelated (table 1, row 2)."""

    name: Literal["decorrelation"] = "decorrelation"
    between: Literal["tokens", "features"] = "tokens"
    """`tokens` is what the table prints, `features` what the paper's text says."""


class L2RepelOptions(SeveralLayersOptions):
    """States pushed apart in Euclidean distance (table 1, row 3)."""

    name: Literal["l2_repel"] = "l2_repel"
    temperature: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    norm_weight: float = Field(default=0.1, ge=0.0, allow_inf_nan=False)
    self_pairs: bool = True
    """Each token is paired with itself too, which bounds the loss from below."""


class OrthogonalizationOptions(SeveralLayersOptions):
    """Cosines above a margin pushed down (table 1, row 4)."""

    name: Literal["orthogonalization"] = "orthogonalization"
    margin: float = Field(default=0.5, ge=0.0, le=1.0)
