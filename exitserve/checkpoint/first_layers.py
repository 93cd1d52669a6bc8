"""The first N layers of a decoder: the tensors that belong to them, and their config."""

import re
from collections.abc import Mapping
from typing import Any

from exitserve.checkpoint.block import BLOCK, num_layers_of, parse_multi_exit
from exitserve.errors import ExitServeError

COUNTS = ("num_hidden_layers", "n_layer")
"""Keys of `config.json` that hold the number of layers; GPT-2 has the second."""
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "sliding_window_pattern")
"""Keys that may hold a list with one entry for each layer (a number there is a period)."""
LAYER_NUMBERS = ("mlp_only_layers",)
"""Keys that hold a list of layers by number, from 0."""
FIRST_WINDOW = "max_window_layers"
"""From this layer on attention has a window (Qwen); vLLM requires it to be within the depth."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """The layer, from 0, that a checkpoint's tensor belongs to; None for all others."""
    found = _LAYER.search(name)
    return None if found is None else int(found[1])


def beyond(name: str, num_layers: int) -> bool:
    """Whether a checkpoint's tensor belongs to a layer above the first `num_layers`."""
    layer = layer_of(name)
    return layer is not None and layer >= num_layers


def check_depth(num_layers: int, config: Mapping[str, Any]) -> None:
    """Refuses a number of layers to keep that the model does not have."""
    full = num_layers_of(config)
    if not 1 <= num_layers <= full:
        raise ExitServeError(
            f"--layers {num_layers} is out of range: the model has {full} layers, so a whole "
            f"number from 1 to {full} is allowed."
        )


def trained_depths(config: Mapping[str, Any]) -> list[int]:
    """Depths whose states the head was trained on, full depth last; empty without exits."""
    block = parse_multi_exit(config)
    return [] if block is None else [*block.exit_layers, num_layers_of(config)]


def doubt(config: Mapping[str, Any], num_layers: int) -> str | None:
    """A warning if the head was not trained to follow `num_layers` layers; None if it was."""
    trained = trained_depths(config)
    if num_layers in (*trained, num_layers_of(config)):
        return None
    reason = "this checkpoint names no exits, so none was trained"
    if trained:
        names = ", ".join(map(str, trained[:-1]))
        reason = f"layer {num_layers} was not trained as an exit (those that were: {names})"
    return (
        f"Warning: {reason}. The quality of the first {num_layers} layers is unknown: "
        f"`python -m exitserve_training.inspect` measures every layer."
    )


def cut_config(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The config of the first `num_layers` layers.

    Exits at or above that depth are dropped, and the block with them if none is left. What a
    calibration promised for full depth is dropped too (`MultiExit.first`).

    Raises:
        ExitServeError: the block of exits is malformed.
    """
    if num_layers == num_layers_of(config):
        return dict(config)
    cut = dict(config)
    for key in COUNTS:
        if key in cut:
            cut[key] = num_layers
    for key in PER_LAYER:
        if isinstance(cut.get(key), list):
            cut[key] = cut[key][:num_layers]
    for key in LAYER_NUMBERS:
        if isinstance(cut.get(key), list):
            cut[key] = [layer for layer in cut[key] if layer < num_layers]
    if isinstance(cut.get(FIRST_WINDOW), int):
        cut[FIRST_WINDOW] = min(cut[FIRST_WINDOW], num_layers)
    block = parse_multi_exit(cut)
    left = None if block is None else block.first(num_layers)
    cut.pop(BLOCK, None)
    if left is not None:
        cut[BLOCK] = left.to_json()
    return cut
