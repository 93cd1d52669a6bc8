"""What a truncation is asked to do, and whether it can be done."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exitserve.checkpoint.block import check_exit_layers, num_layers_of, parse_multi_exit
from exitserve.checkpoint.decoder import check_family
from exitserve.checkpoint.first_layers import layer_of
from exitserve.checkpoint.weights import StoredWeights
from exitserve.errors import ExitServeError

_ENDINGS = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True, kw_only=True)
class TruncationJob:
    """What a truncation was asked to do, checked."""

    model: str
    """As the user named it."""
    directory: Path
    """Folder of the model's files."""
    config: dict[str, Any]
    weights: StoredWeights
    """All tensors of the checkpoint; those of the first `num_layers` layers are kept."""
    num_layers: int
    out: Path
    data: Sequence[Path] = ()
    """Files on which to measure perplexity; without any it is not measured."""


def check_causal(config: dict[str, Any]) -> None:
    """Raises `ExitServeError` unless the checkpoint is a causal LM of a supported family."""
    check_family(config.get("model_type"))
    (name, *_) = config.get("architectures") or ["none named"]
    if not name.endswith(_ENDINGS):
        raise ExitServeError(
            f"architecture {name} is not a causal language model. Only those can be truncated: "
            f"others have no head that fits an earlier layer."
        )
    block = parse_multi_exit(config)
    if block is not None:
        check_exit_layers(block.exit_layers, num_layers_of(config))


def check_names(weights: StoredWeights, num_layers: int) -> None:
    """Raises `ExitServeError` unless tensor names tell the layer, and every layer has some."""
    found = {layer_of(tensor.name) for tensor in weights.tensors}
    missing = sorted(set(range(num_layers)) - found)
    if missing:
        example = weights.tensors[0].name if weights.tensors else "none"
        raise ExitServeError(
            f"no tensor is named as part of layer {missing[0]} (counted from 0): names must be "
            f"like model.layers.{missing[0]}.mlp.up_proj.weight, and are like {example}. "
            f"Save the checkpoint with transformers' save_pretrained first."
        )
