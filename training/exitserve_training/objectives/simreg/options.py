"""Options of SimReg and of its baselines. Imports no torch."""

import math
from typing import Annotated, Literal

from pydantic import Field

from exitserve_training.objectives.options import Layers, SeveralLayersOptions


class ContrastOptions(SeveralLayersOptions):
    """Of a loss that compares the states of tokens by their next tokens."""

    implementation = "exitserve_training.objectives.simreg.objective:Contrast"

    layers: Layers = "last"


class SimRegOptions(ContrastOptions):
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


class SimCSEOptions(ContrastOptions):
    """The baseline SimCSE, adapted to pretraining (table 1)."""

    for_classifiers = True

    name: Literal["simcse"] = "simcse"
    temperature: float = Field(default=0.05, ge=1e-6, allow_inf_nan=False)
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Of the second view of a state."""


class CPretrainOptions(ContrastOptions):
    """The baseline CPretrain (table 1)."""

    name: Literal["cpretrain"] = "cpretrain"
    temperature: float = Field(default=0.07, ge=1e-6, allow_inf_nan=False)


class CRegOptions(ContrastOptions):
    """The baseline CReg (table 1)."""

    name: Literal["creg"] = "creg"
    temperature: float = Field(default=0.1, ge=1e-6, allow_inf_nan=False)


class SCEOptions(ContrastOptions):
    """The baseline SCE (table 1)."""

    name: Literal["sce"] = "sce"
    temperature: float = Field(default=0.1, ge=1e-6, allow_inf_nan=False)
    target_temperature: float = Field(default=0.07, ge=1e-6, allow_inf_nan=False)
    contrast: float = Field(default=0.5, ge=0.0, le=1.0)
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
