"""What is wrong with a recipe, all at once: each mistake with its key and the nearest valid one."""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from exitserve.errors import nearest
from exitserve_training.objectives.registry import OBJECTIVES

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_ELSEWHERE = {
    **dict.fromkeys(("model_name_or_path", "base_model", "model_name"), "model"),
    **dict.fromkeys(("lr", "learning_rate"), "training.learning_rate"),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "training.num_train_epochs"),
    **dict.fromkeys(("steps", "max_steps"), "training.max_steps"),
    **dict.fromkeys(("batch_size", "micro_batch_size"), "training.per_device_train_batch_size"),
    **dict.fromkeys(("max_length", "max_seq_length", "sequence_len"), "data.sequence_length"),
    **dict.fromkeys(("datasets", "dataset_name"), "data.dataset"),
    **dict.fromkeys(("r", "lora_r"), "lora.rank"),
    **{f"lora_{key}": f"lora.{key}" for key in ("alpha", "dropout", "target_modules")},
}
"""What other trainers call keys of recipes."""


def explain(error: ValidationError, root: type[BaseModel], above: str = "") -> str:
    """One line on all problems of a pydantic error.

    Args:
        error: of `root`.
        root: a recipe, or a part of one.
        above: the key of that part, with a dot behind it.
    """
    found: dict[str, list[ErrorDetails]] = defaultdict(list)
    for problem in error.errors():
        found[above + ".".join(map(str, _path(problem)))].append(problem)
    return " ".join(_explained(name, group, root, above) for name, group in found.items())


def _explained(name: str, group: Sequence[ErrorDetails], root: type[BaseModel], above: str) -> str:
    """What is wrong with one key; several problems are those of the types that it may have."""
    first = group[0]
    given = first["input"]
    if first["type"] == "extra_forbidden":
        return _unknown(name, root, _model_at(first["loc"][:-1], root), above)
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        given = given.get("name") if isinstance(given, dict) else given
        return (
            f"recipe key {name!r}: objective {given!r} is unknown."
            f"{nearest(str(given), sorted(OBJECTIVES))} Allowed: {', '.join(OBJECTIVES)}."
        )
    messages = dict.fromkeys(str(one["msg"]).removeprefix("Value error, ") for one in group)
    said = " or ".join(messages)
    if not name:
        return f"recipe: {said}."
    shown = "" if first["type"] in ("missing", "value_error") else f" (given: {given!r})"
    return f"recipe key {name!r}: {said}{shown}."


def _unknown(name: str, root: type[BaseModel], model: type[BaseModel], above: str) -> str:
    key = name.removeprefix(above).rpartition(".")[2]
    allowed = sorted(model.model_fields)
    elsewhere = {**_sections(root), **_ELSEWHERE}.get(key)
    hint = f" Did you mean {elsewhere!r}?" if elsewhere else nearest(key, allowed)
    if ":" in key:
        hint = " YAML wants a space after a colon."
    elif above:
        hint = hint or " Allowed: the fields of transformers.TrainingArguments."
    elif not hint:
        training = " Fields of transformers.TrainingArguments belong under 'training'."
        hint = f"{training if model is root else ''} Allowed here: {', '.join(allowed)}."
    return f"recipe key {name!r} is unknown.{hint}"


def _sections(root: type[BaseModel]) -> dict[str, str]:
    """Where keys of a recipe's parts stand: `rank` is `lora.rank`."""
    parts = {part: _model_at([part], root) for part in root.model_fields}
    nested = {part: model for part, model in parts.items() if model is not root}
    return {key: f"{part}.{key}" for part, at in nested.items() for key in at.model_fields}


def _path(problem: ErrorDetails) -> list[int | str]:
    """The keys that lead to a problem: pydantic's location without its names of types."""
    where = problem["loc"]
    end = next((i for i, part in enumerate(where) if not _is_key(part)), len(where))
    if problem["type"] == "extra_forbidden":
        end = len(where)  # as it was written: YAML reads {rank:8} as one key
    # A discriminated union adds the objective's name behind its number.
    return [p for i, p in enumerate(where[:end]) if not (i > 1 and isinstance(where[i - 1], int))]


def _is_key(part: int | str) -> bool:
    return isinstance(part, int) or (part.isidentifier() and part not in ("int", "float", "str"))


def _model_at(path: Sequence[int | str], root: type[BaseModel]) -> type[BaseModel]:
    """The pydantic class that describes the subtree at `path`, or the one above it."""
    if path and path[0] == "objectives" and len(path) > 2:
        return OBJECTIVES[str(path[2])]
    model = root
    for part in map(str, path):
        annotation = model.model_fields[part].annotation
        if get_origin(annotation) in (Union, types.UnionType):
            annotation = next(arg for arg in get_args(annotation) if arg is not type(None))
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        model = annotation
    return model
