"""The `multi_exit` block in a checkpoint's `config.json`: read, check, write.

The checkpoint stays an ordinary Hugging Face directory: plain transformers and plain vLLM
ignore the block.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from exitserve.calibration_record import CRITERIA, Calibration, calibration_of
from exitserve.errors import ExitServeError

BLOCK = "multi_exit"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class MultiExit:
    """What a checkpoint declares about its exits."""

    exit_layers: tuple[int, ...]
    """Depths at which an exit check may be made, ascending, each in 1..L-1."""
    objective: str = "aligned"
    """How the exits were trained, for readers."""
    criterion: str = "max_prob"
    """How confidence is computed, which thresholds depend on; one of `CRITERIA`."""
    calibration: Calibration | None = None
    """Calibrated thresholds; None where the checkpoint was not calibrated."""

    def validate(self, num_layers: int) -> None:
        """Raises `ExitServeError` unless the block fits a decoder of `num_layers` layers."""
        check_exit_layers(self.exit_layers, num_layers)
        if self.criterion not in CRITERIA:
            allowed = ", ".join(CRITERIA)
            raise ExitServeError(f"criterion {self.criterion!r} is unknown; allowed: {allowed}.")

    def first(self, num_layers: int) -> MultiExit | None:
        """The block for the first `num_layers` layers; None if no exit is left."""
        layers = tuple(layer for layer in self.exit_layers if layer < num_layers)
        if not layers:
            return None
        cut = None if self.calibration is None else self.calibration.first(num_layers)
        return replace(self, exit_layers=layers, calibration=cut)

    def to_json(self) -> dict[str, Any]:
        """The block for `config.json`."""
        block: dict[str, Any] = {
            "version": VERSION,
            "exit_layers": list(self.exit_layers),
            "objective": self.objective,
            "criterion": self.criterion,
        }
        if self.calibration is not None:
            block["calibration"] = self.calibration.to_json()
        return block


def check_exit_layers(exit_layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Returns the exit layers as a tuple if they ascend within 1..L-1.

    Raises:
        ExitServeError: a layer is not an integer, out of range, repeated, or out of order.
    """
    for layer in exit_layers:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise ExitServeError(f"exit layer {layer!r} is not a whole number.")
        if not 1 <= layer < num_layers:
            raise ExitServeError(
                f"exit layer {layer} is out of range: the model has {num_layers} layers, "
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
    found = config.get("num_hidden_layers", config.get("n_layer"))
    if not isinstance(found, int):
        raise ExitServeError("the checkpoint's config.json names no num_hidden_layers.")
    return found


def context_length_of(config: Mapping[str, Any]) -> int | None:
    """The most tokens of a sequence that a `config.json` names; None where it names none."""
    found = config.get("max_position_embeddings", config.get("n_positions"))
    return found if isinstance(found, int) else None


def read_config(model: Path | str) -> dict[str, Any]:
    """Reads the `config.json` of a checkpoint directory or hub id.

    Raises:
        ExitServeError: there is no such checkpoint, or the file is not a JSON object.
    """
    directory = Path(model)
    path = directory / "config.json"
    if not directory.is_dir():
        path = _config_from_hub(str(model))
    if not path.is_file():
        raise ExitServeError(f"'{directory}' has no config.json, so it is not a checkpoint.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ExitServeError(f"'{path}' is not valid JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ExitServeError(f"'{path}' must hold a JSON object.")
    return config


def _config_from_hub(model: str) -> Path:
    """Path of a hub model's `config.json` in the local hub cache, fetched if need be."""
    owner, _, name = model.partition("/")
    # A hub id is "owner/name"; a mistyped path must not wait for the network.
    if not owner or not name or "/" in name or Path(owner).is_dir():
        raise ExitServeError(
            f"no model directory at '{model}'; give a Hugging Face checkpoint directory or hub id."
        )
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(hf_hub_download(model, "config.json"))
    except (HFValidationError, OSError, ValueError) as error:
        raise ExitServeError(
            f"no model at '{model}': it is neither a directory nor a hub id that can be fetched "
            f"({type(error).__name__}); give a Hugging Face checkpoint directory."
        ) from error


def parse_multi_exit(config: Mapping[str, Any]) -> MultiExit | None:
    """Returns the block of a loaded config, or None where there is none.

    Raises:
        ExitServeError: the block is of another version or malformed.
    """
    block = config.get(BLOCK)
    if block is None:
        return None
    if not isinstance(block, dict) or block.get("version") != VERSION:
        found = block.get("version") if isinstance(block, dict) else block
        raise ExitServeError(
            f"the {BLOCK} block is of version {found!r}; this release reads version {VERSION}."
        )
    layers = block.get("exit_layers")
    if not isinstance(layers, list):
        raise ExitServeError(f"{BLOCK}.exit_layers must be a list of layers, not {layers!r}.")
    return MultiExit(
        exit_layers=tuple(layers),
        objective=str(block.get("objective", "aligned")),
        criterion=str(block.get("criterion", "max_prob")),
        calibration=calibration_of(block.get("calibration")),
    )


def read_multi_exit(model: Path | str) -> MultiExit | None:
    """Reads the block of a checkpoint directory or hub id; None where there is none."""
    return parse_multi_exit(read_config(model))


def write_multi_exit(model_dir: Path | str, block: MultiExit) -> None:
    """Puts the block into the checkpoint's `config.json`, replacing an earlier one."""
    config = read_config(model_dir)
    config[BLOCK] = block.to_json()
    replace_text(Path(model_dir) / "config.json", json.dumps(config, indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Writes a file at once: whatever goes wrong, the old one or the new one is there, whole.

    Where `path` is a link, as in the cache of a model hub, the link becomes a file, and what it
    pointed to stays as it is.
    """
    mode = path.stat().st_mode if path.exists() else 0o644
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode & 0o777)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
