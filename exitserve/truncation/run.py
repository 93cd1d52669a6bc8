"""Writes the first layers of a checkpoint as a checkpoint of their own."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exitserve.checkpoint.block import check_exit_layers, num_layers_of, parse_multi_exit
from exitserve.checkpoint.decoder import check_family
from exitserve.checkpoint.exit_rows import load_exit_rows
from exitserve.checkpoint.files import copy_files, new_folder
from exitserve.checkpoint.first_layers import cut_config, layer_of
from exitserve.checkpoint.hub import CARD, files_beside_weights
from exitserve.checkpoint.weights import StoredWeights, write_weights
from exitserve.errors import ExitServeError
from exitserve.truncation.card import model_card
from exitserve.truncation.perplexity import Perplexity, measure_perplexity, read_windows

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


def truncate(
    job: TruncationJob, advance: Callable[[int], Any] = lambda _: None
) -> Perplexity | None:
    """Writes the checkpoint, or, where anything fails, nothing.

    Returns:
        Its perplexity, if that was asked for.

    Raises:
        ExitServeError: the destination exists or cannot be written, the data cannot be read, or
            the perplexity cannot be measured.
    """
    kept = job.weights.first(job.num_layers)
    check_names(kept, job.num_layers)
    block = parse_multi_exit(cut_config(job.config, job.num_layers))
    if block is not None and block.rows_file is not None:
        load_exit_rows(job.directory, block.rows_file)
    if job.data and job.config.get("quantization_config"):
        raise ExitServeError(
            "the perplexity of quantised weights is not measured, since transformers computes "
            "with them differently from vLLM; leave out --data."
        )
    windows = read_windows(job.directory, job.data) if job.data else None
    with new_folder(job.out) as partial:
        write_weights(kept, partial, advance)
        _write_config(job, partial)
        copy_files(job.directory, partial, files_beside_weights(job.directory))
        found = None if windows is None else measure_perplexity(partial, windows, job.data)
        model_card(job, found).save(partial / CARD)
    return found


def _write_config(job: TruncationJob, directory: Path) -> None:
    if job.num_layers == num_layers_of(job.config):
        shutil.copyfile(job.directory / "config.json", directory / "config.json")
        return
    text = json.dumps(cut_config(job.config, job.num_layers), indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
