"""Options of the dispersion loss and of its alternatives. Imports no torch."""

from typing import Literal

from pydantic import Field

from exitserve_training.objectives.options import Layers, SeveralLayersOptions


class SpreadOptions(SeveralLayersOptions):
    """Of a loss that spreads the states of a sequence."""

    implementation = "exitserve_training.objectives.dispersion.objective:Spread"

    weight: float = Field(default=0.1, ge=0.0, allow_inf_nan=False)
    """The paper's lambda."""
    layers: Layers = "all"


class DispersionOptions(SpreadOptions):
    """States of a sequence spread on the sphere (dispersion loss, table 1, row 1)."""

    name: Literal["dispersion"] = "dispersion"
    temperature: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)


class DecorrelationOptions(SpreadOptions):
    """States of a sequence decorrelated (table 1, row 2)."""

    name: Literal["decorrelation"] = "decorrelation"
    between: Literal["tokens", "features"] = "tokens"
    """`tokens` is what the table prints, `features` what the paper's text says."""


class L2RepelOptions(SpreadOptions):
    """States pushed apart in Euclidean distance (table 1, row 3)."""

    name: Literal["l2_repel"] = "l2_repel"
    temperature: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    norm_weight: float = Field(default=0.1, ge=0.0, allow_inf_nan=False)
    self_pairs: bool = True
    """Each token is paired with itself too, which bounds the loss from below."""


class OrthogonalizationOptions(SpreadOptions):
    """Cosines above a margin pushed down (table 1, row 4)."""

    name: Literal["orthogonalization"] = "orthogonalization"
    margin: float = Field(default=0.5, ge=0.0, le=1.0)
