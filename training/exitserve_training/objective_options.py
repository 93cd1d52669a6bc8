"""What a recipe may say about each objective. Imports no torch, so that recipes check at once.

One class an objective; its `name` in the recipe chooses it, and every other key has the default
of the paper it comes from. `exitserve_training.objectives` has the class that does the work.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Layers = Literal["exits", "all", "last"] | list[int]
"""Depths: the recipe's exit layers (and the last), every layer, the last alone, or a list."""

LayerWeights = Literal["linear", "uniform"] | list[float]
"""Linear is the aligned paper's lambda, proportional to depth; a list is one number a layer."""


class Strict(BaseModel):
    """Unknown keys are errors: a misspelt key must not silently train something else."""

    model_config = ConfigDict(extra="forbid")


class _Weighted(Strict):
    weight: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """Multiplies the loss; 0 measures and logs it without training on it."""


class CrossEntropyOptions(_Weighted):
    """Cross-entropy of the last layer alone: plain training."""

    name: Literal["ce"] = "ce"
    balanced: bool = False
    """Of a classifier: every class in a batch counts alike (headless paper, appendix B.1)."""


class AlignedOptions(_Weighted):
    """Cross-entropy of several layers through one norm and head (aligned training, eq. 3)."""

    name: Literal["aligned"] = "aligned"
    layers: Layers = "exits"
    sample: int | None = Field(default=None, ge=1)
    """Of the layers below the last, only so many each step, drawn anew: cheaper with many."""
    weights: LayerWeights = "linear"
    alternate: bool = True
    """Every second optimizer step is plain last-layer cross-entropy (appendix C)."""


class SeparateClassifiersOptions(_Weighted):
    """A norm and a head of its own for each exit (DeeBERT, BERxiT): the papers' baseline."""

    name: Literal["separate_classifiers"] = "separate_classifiers"
    layers: Layers = "exits"
    weights: LayerWeights = "linear"
    detach: bool = False
    """Train the heads on a backbone that only the last layer's loss moves (DeeBERT's way)."""
    kl: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Adds so much of KL(last layer || exit) for each exit."""
    temperature: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)


class CosineAlignmentOptions(_Weighted):
    """1 - cos(h^l, h^L), added to a main loss (aligned training, appendix C: L_CE-reg)."""

    name: Literal["cosine_alignment"] = "cosine_alignment"
    layers: Layers = "all"
    weights: LayerWeights = "linear"
    detach_last: bool = False


class KLToLastOptions(_Weighted):
    """KL(last layer || exit layer) through the shared head: distillation from the last layer."""

    name: Literal["kl_to_last"] = "kl_to_last"
    layers: Layers = "exits"
    weights: LayerWeights = "linear"
    temperature: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)


class _OneLayer(_Weighted):
    layer: Literal["last"] | int = "last"
    normed: bool = True
    """Take the state behind the final norm, as the LM head reads it."""


class SimRegOptions(_OneLayer):
    """Tokens with the same next token drawn together, others pushed apart (SimReg, eq. 3)."""

    name: Literal["simreg"] = "simreg"
    weight: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | Literal["auto"] = "auto"  # type: ignore[assignment]
    """`auto` is 10 * sqrt(D / 1024) (appendix A.2)."""
    temperature: float = Field(default=0.01, ge=1e-6, allow_inf_nan=False)
    similarity: Literal["cosine", "inner"] = "cosine"
    grouping: Literal["sum", "mean", "label"] = "sum"
    chunk_size: int | None = Field(default=None, ge=1)
    chunk_weights: Literal["ratio", "tokens"] = "ratio"


class SimCSEOptions(_OneLayer):
    """SimReg's baseline SimCSE, adapted to pretraining (its table 1)."""

    name: Literal["simcse"] = "simcse"
    level: Literal["sequence", "token"] = "sequence"
    temperature: float = Field(default=0.05, ge=1e-6, allow_inf_nan=False)
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """The second view of a state is the state under dropout; no second pass is made."""


class CPretrainOptions(_OneLayer):
    """SimReg's baseline CPretrain (its table 1)."""

    name: Literal["cpretrain"] = "cpretrain"
    temperature: float = Field(default=0.07, ge=1e-6, allow_inf_nan=False)


class CRegOptions(_OneLayer):
    """SimReg's baseline CReg (its table 1)."""

    name: Literal["creg"] = "creg"
    temperature: float = Field(default=0.1, ge=1e-6, allow_inf_nan=False)


class SCEOptions(_OneLayer):
    """SimReg's baseline SCE (its table 1)."""

    name: Literal["sce"] = "sce"
    temperature: float = Field(default=0.1, ge=1e-6, allow_inf_nan=False)
    target_temperature: float = Field(default=0.07, ge=1e-6, allow_inf_nan=False)
    contrast: float = Field(default=0.5, ge=0.0, le=1.0)
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)


class _Spread(_Weighted):
    weight: float = Field(default=0.1, ge=0.0, allow_inf_nan=False)
    """The dispersion paper's lambda."""
    layers: Layers = "all"
    """The loss is the mean over these layers."""


class DispersionOptions(_Spread):
    """States of a sequence spread on the sphere (dispersion loss, table 1, row 1)."""

    name: Literal["dispersion"] = "dispersion"
    temperature: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)


class DecorrelationOptions(_Spread):
    """Features of a sequence's states decorrelated (dispersion loss, table 1)."""

    name: Literal["decorrelation"] = "decorrelation"


class L2RepelOptions(_Spread):
    """States pushed apart in Euclidean distance (dispersion loss, table 1)."""

    name: Literal["l2_repel"] = "l2_repel"
    temperature: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    norm_weight: float = Field(default=0.1, ge=0.0, allow_inf_nan=False)


class OrthogonalizationOptions(_Spread):
    """Cosines above a margin pushed down (dispersion loss, table 1)."""

    name: Literal["orthogonalization"] = "orthogonalization"
    margin: float = Field(default=0.5, ge=0.0, le=1.0)


class NITPOptions(_Weighted):
    """The last layer also predicts the next position's shallow state (NITP)."""

    name: Literal["nitp"] = "nitp"
    target_layer: Literal["auto"] | int = "auto"
    """`auto` is 20 % of the depth, rounded, at least 1 (the paper's layer 4)."""
    target_shift: int = Field(default=1, ge=0)
    distance: Literal["cosine", "mse", "smooth_l1", "kl"] = "cosine"
    width: int | None = Field(default=None, ge=1)
    """Of the projector's middle; the hidden size by default."""
    project: bool = True
    """False compares the state itself with the target: no prediction head."""
    normed: bool = True


class HeadlessOptions(_Weighted):
    """Contrastive weight tying instead of a head (headless language models, section 3.2)."""

    name: Literal["headless"] = "headless"
    mask_repeated: bool = False
    """Leave out of the negatives those that are the target token itself."""


ObjectiveOptions = (
    CrossEntropyOptions
    | AlignedOptions
    | SeparateClassifiersOptions
    | CosineAlignmentOptions
    | KLToLastOptions
    | SimRegOptions
    | SimCSEOptions
    | CPretrainOptions
    | CRegOptions
    | SCEOptions
    | DispersionOptions
    | DecorrelationOptions
    | L2RepelOptions
    | OrthogonalizationOptions
    | NITPOptions
    | HeadlessOptions
)

OBJECTIVES: dict[str, type[Strict]] = {
    options.model_fields["name"].default: options for options in get_args(ObjectiveOptions)
}
"""What each name in a recipe may have as options."""

MAIN = frozenset({"ce", "aligned", "separate_classifiers", "headless"})
"""Objectives that teach what comes next; the others are added to one of these."""

FOR_CLASSES = frozenset({"ce", "aligned", "separate_classifiers", "kl_to_last", "cosine_alignment"})
"""Objectives that a classifier can have, which says one class for a whole input."""


def _as_mapping(value: Any) -> Any:
    """`aligned` is short for `{name: aligned}`."""
    return {"name": value} if isinstance(value, str) else value


AnyObjective = Annotated[
    Annotated[ObjectiveOptions, Field(discriminator="name")], BeforeValidator(_as_mapping)
]


def check_together(objectives: list[AnyObjective]) -> None:
    """Raises `ValueError` if the objectives contradict each other."""
    names = [objective.name for objective in objectives]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"objective {name!r} is given twice; give each once")
    trained = {objective.name for objective in objectives if objective.weight != 0.0}
    if not trained & MAIN:
        raise ValueError(
            f"objectives {names} teach no next token; add one of {', '.join(sorted(MAIN))} "
            f"with a weight above 0"
        )
    if {"aligned", "ce"} <= trained:
        raise ValueError(
            "objectives 'aligned' and 'ce' both train the last layer: 'aligned' includes it, "
            "and alternates with it by default; leave 'ce' out"
        )
    if {"headless", "separate_classifiers"} <= trained:
        raise ValueError(
            "objective 'headless' trains without a head and 'separate_classifiers' trains "
            "several; choose one"
        )
