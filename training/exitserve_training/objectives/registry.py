"""The objectives by name, and the checks across those of one recipe. Imports no torch."""

import functools
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union

from pydantic import Field, PlainValidator, SerializeAsAny, TypeAdapter

from exitserve_training.objectives.aligned.options import (
    AlignedOptions,
    CosineAlignmentOptions,
    CrossEntropyOptions,
    KLToLastOptions,
    SeparateClassifiersOptions,
)
from exitserve_training.objectives.dispersion.options import (
    DecorrelationOptions,
    DispersionOptions,
    L2RepelOptions,
    OrthogonalizationOptions,
)
from exitserve_training.objectives.headless.options import HeadlessOptions
from exitserve_training.objectives.nitp.options import NITPOptions
from exitserve_training.objectives.options import ObjectiveOptions
from exitserve_training.objectives.simreg.options import (
    CPretrainOptions,
    CRegOptions,
    SCEOptions,
    SimCSEOptions,
    SimRegOptions,
)

OBJECTIVES: dict[str, type[ObjectiveOptions]] = {
    options.model_fields["name"].default: options
    for options in (
        CrossEntropyOptions,
        AlignedOptions,
        SeparateClassifiersOptions,
        CosineAlignmentOptions,
        KLToLastOptions,
        SimRegOptions,
        SimCSEOptions,
        CPretrainOptions,
        CRegOptions,
        SCEOptions,
        DispersionOptions,
        DecorrelationOptions,
        L2RepelOptions,
        OrthogonalizationOptions,
        NITPOptions,
        HeadlessOptions,
    )
}
"""The options of each name that a recipe can use."""


@functools.cache
def _union(options: tuple[type[ObjectiveOptions], ...]) -> TypeAdapter[ObjectiveOptions]:
    return TypeAdapter(_one_of(options))


def _one_of(options: tuple[type[ObjectiveOptions], ...]) -> Any:
    return Annotated[Union[options], Field(discriminator="name")]  # noqa: UP007


def _parse(value: Any) -> ObjectiveOptions:
    """The options that a recipe gives; `aligned` is short for `{name: aligned}`."""
    tree = {"name": value} if isinstance(value, str) else value
    return _union(tuple(OBJECTIVES.values())).validate_python(tree)


_AS_WRITTEN = Literal[tuple(OBJECTIVES)] | _one_of(tuple(OBJECTIVES.values()))

AnyObjective = Annotated[
    SerializeAsAny[ObjectiveOptions], PlainValidator(_parse, json_schema_input_type=_AS_WRITTEN)
]
"""One of `OBJECTIVES`, chosen by its name."""


def check_objectives(objectives: Sequence[ObjectiveOptions], is_classification: bool) -> None:
    """Raises `ValueError` if objectives contradict each other or the task."""
    names = [objective.name for objective in objectives]
    for number, objective in enumerate(objectives):
        has_head = objective.is_main or objective.trains_head
        if objective in objectives[:number] or (has_head and objective.name in names[:number]):
            raise ValueError(
                f"objective {objective.name!r} is given twice; give it once"
                f"{'' if has_head else ', or with other layers'}"
            )
    trained = [objective for objective in objectives if objective.weight != 0.0]
    if not any(objective.is_enough for objective in trained):
        main = sorted(name for name, options in OBJECTIVES.items() if options.is_main)
        raise ValueError(
            f"objectives {names} do not train the model for its task; add one of "
            f"{', '.join(main)} with a weight above 0, or kl_to_last with a teacher"
        )
    for objective in trained:
        for other in trained:
            if other.name in objective.excludes:
                raise ValueError(
                    f"objectives {objective.name!r} and {other.name!r} exclude each other: "
                    f"{objective.excludes[other.name]}"
                )
    for objective in objectives:
        _check_task(objective, is_classification)


def _check_task(objective: ObjectiveOptions, is_classification: bool) -> None:
    if is_classification and not objective.for_classifiers:
        allowed = sorted(name for name, options in OBJECTIVES.items() if options.for_classifiers)
        raise ValueError(
            f"objective {objective.name!r} needs a sequence of tokens to predict, and a "
            f"classifier predicts one class; use {', '.join(allowed)}"
        )
    for field in sorted(objective.classifier_fields & objective.model_fields_set):
        if not is_classification and getattr(objective, field):
            raise ValueError(
                f"objective {objective.name!r}: {field} is for classifiers; leave it out"
            )
