"""Objectives: what a run minimises, built from what the recipe says.

`Objective` is the protocol, `Objectives` their weighted sum, `build_objectives` the factory.
"""

from __future__ import annotations

from collections.abc import Sequence

from exitserve.errors import ExitServeError
from exitserve_training.losses import Head
from exitserve_training.losses.weights import counted_layers
from exitserve_training.objective_options import (
    AlignedOptions,
    AnyObjective,
    CosineAlignmentOptions,
    CrossEntropyOptions,
    HeadlessOptions,
    KLToLastOptions,
    Layers,
    NITPOptions,
    SeparateClassifiersOptions,
)
from exitserve_training.objectives.base import Batch, Metrics, Objective
from exitserve_training.objectives.composed import NonFiniteLossError, Objectives
from exitserve_training.objectives.exits import (
    Aligned,
    CrossEntropy,
    SeparateClassifiers,
    TowardsLast,
)
from exitserve_training.objectives.geometry import Similarity, SimilarityOptions, Spread
from exitserve_training.objectives.prediction import Headless, NextImplicitToken

__all__ = [
    "Batch",
    "Metrics",
    "NonFiniteLossError",
    "Objective",
    "Objectives",
    "SeparateClassifiers",
    "build_objectives",
    "check_layers",
]

SHALLOW = 0.2
"""Where NITP's target lies, as a share of the depth (the paper's layer 4)."""


def check_layers(
    chosen: Sequence[AnyObjective], exit_layers: Sequence[int], num_layers: int
) -> None:
    """Raises `ExitServeError` if an objective names a layer or weights that do not fit the model.

    Args:
        chosen: the recipe's objectives.
        exit_layers: the recipe's exit layers, below the last.
        num_layers: L.
    """
    for options in chosen:
        layers = _layers_of(options, exit_layers, num_layers)
        given = getattr(options, "weights", None)
        if isinstance(given, list) and len(given) != len(layers):
            raise ExitServeError(
                f"objective {options.name!r}: weights has {len(given)} numbers, but its layers are "
                f"{list(layers)}; give one for each."
            )
        inner = [layer for layer in layers if layer != num_layers]
        if isinstance(
            options, SeparateClassifiersOptions | CosineAlignmentOptions | KLToLastOptions
        ):
            _require_inner(options.name, inner)
        if isinstance(options, AlignedOptions) and options.sample is not None:
            _require_inner("aligned with sample", inner)


def build_objectives(
    chosen: Sequence[AnyObjective],
    *,
    exit_layers: Sequence[int],
    num_layers: int,
    hidden_size: int,
    head: Head,
    seed: int,
) -> Objectives:
    """Builds what the recipe's objectives minimise.

    Args:
        chosen: the recipe's objectives.
        exit_layers: the recipe's exit layers, below the last.
        num_layers: L.
        hidden_size: D.
        head: the model's norm and head.
        seed: of everything drawn.

    Raises:
        ExitServeError: a layer or a weight does not fit the model.
    """
    check_layers(chosen, exit_layers, num_layers)
    parts = [
        _build(
            options,
            _layers_of(options, exit_layers, num_layers),
            num_layers,
            hidden_size,
            head,
            seed,
        )
        for options in chosen
    ]
    return Objectives(parts)


def _build(
    options: AnyObjective,
    layers: tuple[int, ...],
    num_layers: int,
    hidden_size: int,
    head: Head,
    seed: int,
) -> Objective:
    match options:
        case CrossEntropyOptions():
            return CrossEntropy(options, num_layers)
        case AlignedOptions():
            return Aligned(options, layers, num_layers, seed)
        case SeparateClassifiersOptions():
            return SeparateClassifiers(options, layers, num_layers, head)
        case CosineAlignmentOptions() | KLToLastOptions():
            return TowardsLast(options, layers, num_layers)
        case NITPOptions():
            return NextImplicitToken(options, layers[0], num_layers, hidden_size)
        case HeadlessOptions():
            return Headless(options, num_layers)
        case _ if isinstance(options, SimilarityOptions):
            return Similarity(options, layers[0], hidden_size)
        case _:
            return Spread(options, layers)


def _layers_of(
    options: AnyObjective, exit_layers: Sequence[int], num_layers: int
) -> tuple[int, ...]:
    """The depths that an objective acts on, ascending, checked."""
    if isinstance(options, NITPOptions):
        shallow = max(1, round(SHALLOW * num_layers))
        return (_checked(options.target_layer, shallow, num_layers, options.name),)
    if isinstance(options, SimilarityOptions):
        return (_checked(options.layer, num_layers, num_layers, options.name),)
    layers: Layers = getattr(options, "layers", "last")
    if layers == "last":
        return (num_layers,)
    if layers == "exits":
        return counted_layers(num_layers, exit_layers)
    if layers == "all":
        return counted_layers(num_layers, None)
    for layer in layers:
        _checked(layer, num_layers, num_layers, options.name)
    if not layers:
        raise ExitServeError(f"objective {options.name!r}: layers is empty; name at least one.")
    spread = not hasattr(options, "weights")
    return tuple(sorted(set(layers))) if spread else counted_layers(num_layers, layers)


def _checked(layer: int | str, default: int, num_layers: int, name: str) -> int:
    if isinstance(layer, str):
        return default
    if not 1 <= layer <= num_layers:
        raise ExitServeError(
            f"objective {name!r}: layer {layer} is out of range; the model has {num_layers} "
            f"layers, so choose from 1..{num_layers}."
        )
    return layer


def _require_inner(name: str, inner: Sequence[int]) -> None:
    if not inner:
        raise ExitServeError(
            f"objective {name!r} needs a layer below the last; set exit_layers, or its layers."
        )
