"""The `multi_exit` block in a checkpoint's `config.json`: read, check, write.

The checkpoint stays an ordinary Hugging Face directory: plain transformers and plain vLLM
ignore the block.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from exitserve.checkpoint.calibration import (
    ROWS_FOLDER,
    Calibration,
    Criterion,
    Layer,
    Number,
    json_of,
)
from exitserve.checkpoint.files import replace_file
from exitserve.checkpoint.hub import BLOCK_FILE, hub_file, is_adapter
from exitserve.errors import ExitServeError, shown

BLOCK = "multi_exit"
VERSION = 1
_FIX = (
    f"Correct it in config.json, or remove {BLOCK}.calibration there and run `exitserve calibrate`."
)
_IN_JSON = {"tuple_type": "it should be a list"} | dict.fromkeys(
    ("dict_type", "dataclass_type"), "it should be an object"
)
"""What pydantic words as Python has it, by the type of its error."""


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="ignore"))
class TrainedExit:
    """What training found of an exit, on the text that the run held out."""

    agreement: Annotated[Number, Field(ge=0, le=1)]
    """The share of tokens whose most likely token here is full depth's."""
    usable_from: Annotated[Number, Field(ge=0, lt=1)] | None = None
    """The least confidence above which nine of ten tokens are full depth's; None: there is none."""
    share: Annotated[Number, Field(ge=0, le=1)] | None = None
    """Of all tokens, those above it."""
    more_tokens: Annotated[int, Field(ge=0)] | None = None
    """Not usable: what half of the agreement would take at the run's pace, where that is known."""

    def __str__(self) -> str:
        agrees = f"agrees with full depth on {self.agreement:.0%} of held-out predictions"
        if self.usable_from is not None and self.share is not None:
            return f"{agrees}, usable above confidence {self.usable_from:g} ({self.share:.0%} are)"
        pace = "" if self.more_tokens is None else f", {self.more_tokens:,} tokens or more"
        return f"{agrees}, not usable: train longer{pace}"


# Keys that this release does not know are ignored, here and in all that the block holds: a later
# release may add some without which an earlier one serves as promised. What an earlier one must not
# overlook comes with another version.
@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="ignore"))
class MultiExit:
    """What a checkpoint declares about its exits."""

    exit_layers: tuple[Layer, ...]
    """Depths at which an exit check may be made, ascending, each in 1..L-1."""
    objective: str = "aligned"
    """How the exits were trained, for readers."""
    criterion: Criterion = "max_prob"
    """How confidence is computed, which thresholds depend on; one of `CRITERIA`."""
    rows: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """The name of the exit rows, see `rows_file`; None where checks read the whole head."""
    calibration: Calibration | None = None
    """Calibrated thresholds; None where the checkpoint was not calibrated."""
    trained: Mapping[Annotated[int, Field(ge=1)], TrainedExit] | None = None
    """By exit layer, what training found of it; None where nothing is known."""

    @model_validator(mode="after")
    def _is_consistent(self) -> MultiExit:
        if list(self.exit_layers) != sorted(set(self.exit_layers)):
            raise ExitServeError(
                f"{BLOCK}.exit_layers is {shown(list(self.exit_layers))}; it must ascend "
                f"without repeats."
            )
        if self.calibration is None:
            return self
        if self.calibration.criterion != self.criterion:
            raise ExitServeError(
                f"{BLOCK}.calibration.criterion is {self.calibration.criterion!r}, but its "
                f"thresholds would be compared with {BLOCK}.criterion, {self.criterion!r}."
            )
        for name, point in self.calibration.by_name().items():
            for key, thresholds in point.by_name().items():
                for layer in sorted(thresholds.keys() - set(self.exit_layers)):
                    raise ExitServeError(
                        f"{BLOCK}.calibration.{name}{key} names layer {shown(layer)}, "
                        f"which is none of {BLOCK}.exit_layers."
                    )
        return self

    @property
    def rows_file(self) -> str | None:
        """The file of its exit rows, in the checkpoint; None where it has none.

        It is named by its contents, so that rows and thresholds change together: at the moment
        when a new config.json, which names them, is there.
        """
        return None if self.rows is None else f"{ROWS_FOLDER}/{self.rows}.safetensors"

    def first(self, num_layers: int) -> MultiExit | None:
        """The block for the first `num_layers` layers; None if no exit is left."""
        layers = tuple(layer for layer in self.exit_layers if layer < num_layers)
        if not layers:
            return None
        cut = None if self.calibration is None else self.calibration.first(num_layers)
        # What is known of an exit is about another full depth.
        return replace(self, exit_layers=layers, calibration=cut, trained=None)

    @property
    def verdict(self) -> str | None:
        """What training found of the exits, on one line; None where nothing is known."""
        found = [f"{layer} {one}" for layer, one in (self.trained or {}).items()]
        return f"Exits: {'; '.join(found)}." if found else None

    def to_json(self) -> dict[str, Any]:
        """The block for `config.json`."""
        found = {key: value for key, value in json_of(self).items() if value is not None}
        return {"version": VERSION, **found}


def check_exit_layers(exit_layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Returns the exit layers as a tuple if they ascend within 1..L-1.

    Raises:
        ExitServeError: a layer is not an integer, out of range, repeated, or out of order.
    """
    for layer in exit_layers:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise ExitServeError(f"exit layer {shown(layer)} is not a whole number.")
        if not 1 <= layer < num_layers:
            raise ExitServeError(
                f"exit layer {shown(layer)} is out of range: the model has {num_layers} layers, "
                f"so exit layers lie in 1..{num_layers - 1}."
            )
    if list(exit_layers) != sorted(set(exit_layers)):
        raise ExitServeError(
            f"exit layers {list(exit_layers)} must ascend without repeats; "
            f"write {sorted(set(exit_layers))}."
        )
    return tuple(exit_layers)


def num_layers_of(config: Mapping[str, Any]) -> int:
    """L, the depth that a `config.json` names.

    Raises:
        ExitServeError: it names none.
    """
    found = _depth_of(config)
    if not isinstance(found, int):
        raise ExitServeError("the checkpoint's config.json names no num_hidden_layers.")
    return found


def _depth_of(config: Mapping[str, Any]) -> Any:
    return config.get("num_hidden_layers", config.get("n_layer"))


def context_length_of(config: Mapping[str, Any]) -> int | None:
    """The most tokens of a sequence that a `config.json` names; None where it names none."""
    found = config.get("max_position_embeddings", config.get("n_positions"))
    return found if isinstance(found, int) else None


def read_config(model: Path | str, revision: str | None = None) -> dict[str, Any]:
    """Reads the `config.json` of a checkpoint directory or hub id, the latter at a revision.

    Raises:
        ExitServeError: there is no such checkpoint, or the file is not a JSON object.
    """
    directory = Path(model)
    path = directory / "config.json"
    if not directory.is_dir():
        path = hub_file(str(model), "config.json", revision)
    kind = "not a checkpoint"
    if is_adapter(directory):
        kind = f"no whole model but an adapter; give its base as MODEL, and --adapter {directory}"
    return read_json_object(path, f"'{directory}' has no config.json, so it is {kind}.")


def read_json_object(path: Path, missing: str) -> dict[str, Any]:
    """Reads a file that holds a JSON object.

    Raises:
        ExitServeError: it holds something else, or there is none, which `missing` says.
    """
    if not path.is_file():
        raise ExitServeError(missing)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExitServeError(f"'{path}' cannot be read ({error.strerror}).") from error
    # Not text, not JSON, a number of thousands of digits, or nested thousands of levels deep.
    except (ValueError, RecursionError) as error:
        raise ExitServeError(f"'{path}' is not valid JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ExitServeError(f"'{path}' must hold a JSON object.")
    return found


def parse_multi_exit(config: Mapping[str, Any]) -> MultiExit | None:
    """Returns the block of a loaded config, or None where there is none.

    Whether its exit layers fit the model is for the caller to check (`check_exit_layers`).

    Raises:
        ExitServeError: the block is of another version or malformed.
    """
    block = config.get(BLOCK)
    if block is None:
        return None
    if isinstance(block, dict) and block.get("version") != VERSION:
        raise ExitServeError(
            f"the {BLOCK} block is of version {shown(block.get('version'))}; this release "
            f"reads version {VERSION}."
        )
    try:
        return TypeAdapter(MultiExit).validate_python(block)
    except ValidationError as error:
        raise ExitServeError(_explain(error)) from error


def _explain(error: ValidationError) -> str:
    """The first problem that pydantic found, as one line that names the key and its value."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ExitServeError):
        return f"{cause} {_FIX}"
    # On disk the keys of the chosen point stand beside the others.
    path = [part for part in first["loc"] if part not in ("chosen", "[key]")]
    name = BLOCK + "".join(_step(part) for part in path)
    should = _IN_JSON.get(first["type"]) or first["msg"].removeprefix("Value error, ")
    should = should.replace("Input should", "it should").replace("String should", "it should")
    if first["type"] == "missing":
        return f"{name} is missing. {_FIX}"
    if first["loc"][-1:] == ("[key]",):
        return f"{name} must be named by a layer, a whole number above 0. {_FIX}"
    return f"{name} is {shown(first['input'])}; {should}. {_FIX}"


def _step(part: int | str) -> str:
    """A part of a path into JSON, short and on one line whatever the key."""
    return f"[{part}]" if isinstance(part, int) else f".{shown(part)[1:-1]}"


def read_multi_exit(model: Path | str, revision: str | None = None) -> MultiExit | None:
    """Reads the block of a checkpoint directory or hub id; None where there is none.

    Raises:
        ExitServeError: it is malformed, or does not fit the model's depth.
    """
    config = read_config(model, revision)
    block = parse_multi_exit(config)
    if block is not None and _depth_of(config) is not None:  # some classifiers call it otherwise
        check_exit_layers(block.exit_layers, num_layers_of(config))
    return block


def block_file(directory: Path) -> Path:
    """The file of a checkpoint or adapter that holds the block."""
    return directory / (BLOCK_FILE if is_adapter(directory) else "config.json")


def write_multi_exit(
    model_dir: Path | str, block: MultiExit, config: Mapping[str, Any] | None = None
) -> None:
    """Puts the block into a checkpoint's `config.json`, or an adapter's `multi_exit.json`.

    Exit rows that it names must be there. Those that it does not are removed afterwards, so at
    every moment the checkpoint has the rows that its `config.json` names.

    Args:
        model_dir: the checkpoint or adapter.
        block: its exits.
        config: to be written instead of the checkpoint's own; of an adapter there is none.
    """
    directory = Path(model_dir)
    path = block_file(directory)
    if path.name == BLOCK_FILE:
        known: Mapping[str, Any] = {}
    else:
        known = read_config(directory) if config is None else config
    text = json.dumps({**known, BLOCK: block.to_json()}, indent=2) + "\n"
    replace_file(path, text.encode())
    for path in (directory / ROWS_FOLDER).glob("*.safetensors*"):  # and unfinished ones
        if block.rows_file != f"{ROWS_FOLDER}/{path.name}":
            path.unlink()
