"""Options of SimReg and of its baselines. Imports no torch."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from exitserve_training.objectives.options import ObjectiveOptions


class OneLayerOptions(ObjectiveOptions):
    """Of a loss of one layer's states."""

    implementation = "exitserve_training.objectives.simreg.objective:OneLayer"

    layer: Literal["last"] | int = "last"

    def layers_used(self, exit_layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
        """See `ObjectiveOptions`."""
        return (num_layers if self.layer == "last" else self._depth(self.layer, num_layers),)


class SimRegOptions(OneLayerOptions):
    """Tokens with the same next token drawn together, others pushed apart (SimReg, eq. 3)."""

    name: Literal["simreg"] = "simreg"
    weight: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | Literal["auto"] = "auto"  # type: ignore[assignment]
    """`auto` is 10 * sqrt(D / 1024) (appendix A.2)."""
    temperature: float = Field(default=0.01, ge=1e-6, allow_inf_nan=False)
    similarity: Literal["cosine", "inner"] = "cosine"
    chunk_size: int | None = Field(default=None, ge=1)

    def weight_for(self, hidden_size: int) -> float:
        """See `ObjectiveOptions`."""
        return 10.0 * math.sqrt(hidden_size / 1024) if self.weight == "auto" else self.weight


class SimCSEOptions(OneLayerOptions):
    """The baseline SimCSE, adapted to pretraining (table 1)."""

    name: Literal["simcse"] = "simcse"
    temperature: float = Field(default=0.05, ge=1e-6, allow_inf_nan=False)
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Of the second view of a state."""


class CPretrainOptions(OneLayerOptions):
    """The baseline CPretrain (table 1)."""

    name: Literal["cpretrain"] = "cpretrain"
    temperature: float = Field(default=0.07, ge=1e-6, allow_inf_nan=False)


class CRegOptions(OneLayerOptions):
    """The baseline CReg (table 1)."""

    name: Literal["creg"] = "creg"
    temperature: float = Field(default=0.1, ge=1e-6, allow_inf_nan=False)


class SCEOptions(OneLayerOptions):
    """The baseline SCE (table 1)."""

    name: Literal["sce"] = "sce"
    temperature: float = Field(default=0.1, ge=1e-6, allow_inf_nan=False)
    target_temperature: float = Field(default=0.07, ge=1e-6, allow_inf_nan=False)
    contrast: float = Field(default=0.5, ge=0.0, le=1.0)
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
