"""What is wrong with a recipe, all at once: each mistake with its key and the nearest valid one."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from exitserve.errors import nearest
from exitserve_training.objectives.registry import OBJECTIVES

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_ALSO_CALLED = {
    "model": ("model_name_or_path", "base_model", "model_name"),
    "training.learning_rate": ("lr", "learning_rate"),
    "training.num_train_epochs": ("epochs", "num_epochs", "num_train_epochs"),
    "training.max_steps": ("steps", "max_steps"),
    "training.per_device_train_batch_size": ("batch_size", "micro_batch_size"),
    "data.sequence_length": ("max_length", "max_seq_length", "sequence_len", "sequence_length"),
    "data.dataset": ("dataset", "datasets", "dataset_name"),
    "lora.rank": ("r", "lora_r", "rank"),
    "lora.alpha": ("lora_alpha", "alpha"),
}
"""What other trainers call keys of recipes, and where they put them."""
_MEANT = {name: key for key, names in _ALSO_CALLED.items() for name in names}


def explain(error: ValidationError, root: type[BaseModel], above: str = "") -> str:
    """One line on all that is wrong with a recipe, or with the part that is called `above`."""
    found: dict[str, list[str]] = {}
    for problem in error.errors():
        path = _path(problem)
        key = above + ".".join(map(str, path))
        found.setdefault(f"recipe key {key!r}" if key else "recipe", []).append(
            _unknown(problem["loc"], root, above)
            if problem["type"] == "extra_forbidden"
            else _wrong(problem)
        )
    # Several problems of a key are those of the types that it may have.
    said = (f"{name}{' or'.join(dict.fromkeys(parts))}" for name, parts in found.items())
    return " ".join(text if text.endswith("?") else f"{text}." for text in said)


def _wrong(problem: ErrorDetails) -> str:
    given = problem["input"]
    if problem["type"] in ("union_tag_invalid", "union_tag_not_found"):
        name = given.get("name") if isinstance(given, dict) else given
        hint = nearest(str(name), sorted(OBJECTIVES))
        return f": objective {name!r} is unknown.{hint} Allowed: {', '.join(OBJECTIVES)}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    shown = "" if problem["type"] in ("missing", "value_error") else f" (given: {given!r})"
    return f": {message}{shown}"


def _unknown(where: Sequence[int | str], root: type[BaseModel], above: str) -> str:
    key, model = str(where[-1]), _model_at(where[:-1], root)
    allowed = sorted(model.model_fields)
    hint = f" Did you mean {_MEANT[key]!r}?" if key in _MEANT else nearest(key, allowed)
    arguments = "fields of transformers.TrainingArguments"
    if ":" in key:
        hint = " YAML wants a space after a colon"
    elif not hint and above:
        hint = f" Allowed: the {arguments}"
    elif not hint:
        training = f" The {arguments} belong under 'training'." if model is root else ""
        hint = f"{training} Allowed here: {', '.join(allowed)}"
    return f" is unknown.{hint}"


def _path(problem: ErrorDetails) -> list[int | str]:
    """The keys that lead to a problem: pydantic's location without its names of types."""
    where = problem["loc"]
    types_at = (i for i, part in enumerate(where) if not _is_key(part))
    # An unknown key is named as it was written: YAML reads {rank:8} as one key.
    end = len(where) if problem["type"] == "extra_forbidden" else next(types_at, len(where))
    # A discriminated union adds the objective's name behind its number.
    return [p for i, p in enumerate(where[:end]) if not (i > 1 and isinstance(where[i - 1], int))]


def _is_key(part: int | str) -> bool:
    return isinstance(part, int) or (part.isidentifier() and part not in ("int", "float", "str"))


def _model_at(path: Sequence[int | str], root: type[BaseModel]) -> type[BaseModel]:
    """The pydantic class that describes the subtree at `path`."""
    if path and path[0] == "objectives" and len(path) > 2:
        return OBJECTIVES[str(path[2])]
    model = root
    for part in map(str, path):
        annotation = model.model_fields[part].annotation
        if get_origin(annotation) in (Union, types.UnionType):
            annotation = next(arg for arg in get_args(annotation) if arg is not type(None))
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
        model = annotation
    return model
