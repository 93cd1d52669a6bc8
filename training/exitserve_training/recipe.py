"""Recipes: one YAML file describes one training run; `key=value` on the command line overrides.

This module imports neither torch nor transformers, so that a recipe can be checked at once.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from exitserve.errors import ExitServeError, nearest


class _Strict(BaseModel):
    """Unknown keys are errors: a misspelt key must not silently train something else."""

    model_config = ConfigDict(extra="forbid")


class TrainBpe(_Strict):
    """A byte-level BPE trained on the run's own training documents."""

    vocab_size: int = Field(ge=258)
    """Entries, the 256 bytes and two special tokens included."""


class TokenizerRecipe(_Strict):
    """Which tokenizer: an existing one, or one trained on the data."""

    path: str | None = None
    """Directory or hub id."""
    train_bpe: TrainBpe | None = None

    @model_validator(mode="after")
    def _one_of(self) -> TokenizerRecipe:
        if (self.path is None) == (self.train_bpe is None):
            raise ValueError("give exactly one of tokenizer.path and tokenizer.train_bpe")
        return self


class DataRecipe(_Strict):
    """Where the documents come from and how they are cut; see `docs/training.md`."""

    files: list[str] = Field(default_factory=list)
    """Text (.txt, .md, .py, ...: one document per file), .jsonl, .json or .parquet; globs."""
    dataset: str | None = None
    """A `datasets` id."""
    dataset_config: str | None = None
    dataset_split: str = "train"
    text_field: str = "text"
    """The column that holds the text, for JSONL, Parquet and `dataset`."""
    python_source: list[Literal["stdlib", "site-packages"]] = Field(default_factory=list)
    """Python files of this very installation, read where they lie."""
    exclude: list[str] = Field(default_factory=list)
    """Glob patterns of `python_source` names (`site-packages/pkg/mod.py`) to leave out."""
    max_file_bytes: int | None = Field(default=None, ge=1)
    """Longer documents are left out."""
    max_package_bytes: int | None = Field(default=None, ge=1)
    """At most so much of one top-level package of `python_source`."""
    max_bytes: int | None = Field(default=None, ge=1)
    """At most so much text in all, drawn by the seed."""
    validation_files: list[str] = Field(default_factory=list)
    """Held-out files; without them a share of the documents is held out."""
    validation_fraction: float = Field(default=0.01, gt=0.0, lt=1.0)
    validation_blocks: int = Field(default=128, ge=1)
    """Evaluate on at most so many sequences."""
    sequence_length: int = Field(default=512, ge=2)
    """Tokens per packed sequence."""

    @model_validator(mode="after")
    def _some_source(self) -> DataRecipe:
        if not (self.files or self.dataset or self.python_source):
            raise ValueError("data needs one of data.files, data.dataset, data.python_source")
        return self


class Recipe(_Strict):
    """Everything about one training run."""

    output_dir: str
    data: DataRecipe
    model: str | None = None
    """Directory or hub id of a causal LM to fine-tune."""
    config: dict[str, Any] | None = None
    """From scratch instead: `architecture` (llama, qwen2, ...) and that family's sizes."""
    tokenizer: TokenizerRecipe | None = None
    """Default: the one of `model`."""
    objective: Literal["aligned", "ce"] = "aligned"
    exit_layers: Literal["all"] | list[int] = "all"
    """Depths whose loss counts; the last layer always does."""
    weights: Literal["linear", "uniform"] = "linear"
    alternate: bool = True
    """With `aligned`: every second optimizer step is plain last-layer cross-entropy."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Fields of Hugging Face `TrainingArguments`."""
    seed: int = Field(default=0, ge=0)
    bf16: bool = False
    """Compute in bfloat16 by autocast; weights and optimizer stay float32."""
    compile_layers: bool = False
    """`torch.compile` each decoder layer; needs a C compiler, pays on runs of minutes or more."""
    resume: bool = False
    """Continue from the newest checkpoint in `output_dir`."""
    overwrite: bool = False
    """Empty `output_dir` first if it exists."""
    sample_texts: list[str] = Field(default_factory=list)
    """Prompts to complete greedily after training; they go into the report."""

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if (self.model is None) == (self.config is None):
            raise ValueError("give exactly one of model (to fine-tune) and config (from scratch)")
        if self.config is not None and not isinstance(self.config.get("architecture"), str):
            raise ValueError("config needs architecture, for example config.architecture=llama")
        if self.config is not None and self.tokenizer is None:
            raise ValueError(
                "config (from scratch) needs a tokenizer, "
                "for example tokenizer.train_bpe.vocab_size=4096"
            )
        if self.resume and self.overwrite:
            raise ValueError("resume and overwrite exclude each other; set one of them to false")
        return self


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe and applies `dotted.key=value` overrides (values are YAML).

    Raises:
        ExitServeError: no such file, invalid YAML, an unknown key (with the nearest valid one),
            or a bad value.
    """
    file = Path(path)
    if not file.is_file():
        raise ExitServeError(f"no recipe at '{file}'; give a YAML file, see `exitserve train -h`.")
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ExitServeError(f"recipe '{file}' is not valid YAML: {reason}") from error
    if not isinstance(tree, dict):
        raise ExitServeError(f"recipe '{file}' must hold keys and values, such as `output_dir: x`.")
    for override in overrides:
        _apply(tree, override)
    return parse_recipe(tree)


def parse_recipe(tree: dict[str, Any]) -> Recipe:
    """Checks a recipe given as a dictionary; raises `ExitServeError` with one line."""
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise ExitServeError(_explain(error)) from error


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, raw = override.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise ExitServeError(f"override {override!r} is not key=value, such as seed=1.")
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError as error:
        raise ExitServeError(f"the value of override {override!r} is not valid YAML.") from error
    # YAML 1.1 reads 1e-3 (no dot) as text; nobody means text by it.
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    node = tree
    for part in parts[:-1]:
        child = node.get(part)
        if not isinstance(child, dict):
            child = node[part] = {}
        node = child
    node[parts[-1]] = value


def _explain(error: ValidationError) -> str:
    """The first problem of a pydantic error as one line a user can act on."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"]]
    name = ".".join(where)
    if first["type"] == "extra_forbidden":
        allowed = sorted(_model_at(where[:-1]).model_fields)
        return (
            f"recipe key {name!r} is unknown.{nearest(where[-1], allowed)} "
            f"Allowed here: {', '.join(allowed)}."
        )
    message = str(first["msg"]).removeprefix("Value error, ")
    if not name:
        return f"recipe: {message}."
    given = "" if first["type"] in ("missing", "value_error") else f" (given: {first['input']!r})"
    return f"recipe key {name!r}: {message}{given}."


def _model_at(path: Sequence[str]) -> type[BaseModel]:
    """The pydantic class that describes the recipe's subtree at `path`."""
    model: type[BaseModel] = Recipe
    for part in path:
        annotation = model.model_fields[part].annotation
        if get_origin(annotation) in (Union, types.UnionType):
            annotation = next(arg for arg in get_args(annotation) if arg is not type(None))
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        model = annotation
    return model
