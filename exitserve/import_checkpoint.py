"""`exitserve import`: names the exits of a checkpoint that was trained elsewhere.

Layer dropout with an early-exit loss (LayerSkip) and the aligned loss leave one norm and one head
that every exit shares, which is what is served here; only the list of layers is missing. Light to
import; no tensor is loaded.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exitserve import arguments
from exitserve.arguments import add_model_command, with_adapter
from exitserve.checkpoint.block import (
    BLOCK,
    MultiExit,
    check_exit_layers,
    num_layers_of,
    read_config,
    write_multi_exit,
)
from exitserve.checkpoint.files import check_new_folder, copy_files, new_folder
from exitserve.checkpoint.first_layers import layer_of
from exitserve.checkpoint.hub import CARD, files_beside_weights, local_checkpoint
from exitserve.checkpoint.weights import StoredTensor, index_of, read_weights, weight_files
from exitserve.errors import ExitServeError

DESCRIPTION = """\
Write a copy of a checkpoint that names its exits, for one that was trained elsewhere.

  exitserve import facebook/layerskip-llama3.2-1B --exit-layers 4,8,12 --out DIR
  exitserve import jiachenjiang/aligned-GPT2 --out DIR       it names its exits itself

Exits must share the model's norm and head, as after training with layer dropout and early-exit
loss (LayerSkip) or with the aligned loss; heads of their own are refused. Safetensors only. To try
exits without a copy: exitserve serve MODEL --exit-layers 4,8,12.
"""

ALIGNED_LAYERS = "lm_head_layer_indices"
"""Key of the aligned-training paper's GPT-2: depths whose states go through the head."""

PLAIN_NAMES = {"MultiExitGPT2": "GPT2LMHeadModel"}
"""Architectures that compute what an ordinary one does, by the name of that."""

_SHARED = re.compile(
    r"(?:^|\.)(?:embed_tokens|wte|wpe|norm|ln_f|lm_head)\.[a-z_]+$|(?:^|\.)rotary_emb\.inv_freq$"
)
"""Names of tensors outside the layers of a decoder with one norm and one head."""
_OF_AN_EXIT = re.compile(r"exit|early|classifier|lm_?head")
"""In the name of a tensor inside a layer."""


def add_import(subparsers: Any) -> None:
    """Adds the `import` command."""
    parser = add_model_command(
        subparsers,
        "import",
        _run,
        help="name the exits of a checkpoint trained elsewhere",
        description=DESCRIPTION,
    )
    parser.add_argument(
        "--exit-layers",
        type=arguments.exit_layers_of,
        metavar="N,N",
        help="depths at which tokens may exit (default: what the checkpoint names)",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="a new folder")


def _run(args: argparse.Namespace) -> int:
    out = Path(args.out)
    check_new_folder(out)
    given = args.model if args.adapter is None else f"{args.model} --adapter {args.adapter}"
    args = with_adapter(args)
    config = read_config(args.model, args.revision)
    layers = exit_layers_of(config, args.exit_layers, given)
    directory = local_checkpoint(args.model, args.revision)
    check_shared_head(read_weights(directory).tensors)
    objective = "aligned" if ALIGNED_LAYERS in config else "imported"
    block = MultiExit(exit_layers=layers, objective=objective)
    weights = [Path(name) for name in weight_files(directory)]
    extra = [Path(name) for name in (*index_of(directory), CARD) if (directory / name).is_file()]
    with new_folder(out) as partial:
        copy_files(directory, partial, (*weights, *extra, *files_beside_weights(directory)))
        write_multi_exit(partial, block, plain_config(config))
    listed = ",".join(map(str, layers))
    print(f"{out}: exits after layers {listed} of {num_layers_of(config)}.")
    print(f"Next: exitserve serve {out} --exit-threshold 0.8, or exitserve calibrate {out} ...")
    if config.get("architectures") == plain_config(config).get("architectures"):
        print(f"The same without a copy: exitserve serve {given} --exit-layers {listed}")
    return 0


def exit_layers_of(
    config: Mapping[str, Any], given: Sequence[int] | None, model: str
) -> tuple[int, ...]:
    """The exits to write: those given, or those that the aligned paper's format names.

    Raises:
        ExitServeError: the checkpoint has the block already, is of no supported family, or names
            no exits, or the layers do not fit it.
    """
    from exitserve.checkpoint.decoder import check_family  # loads torch

    if BLOCK in config:
        raise ExitServeError(
            f"'{model}' has a {BLOCK} block already; serve it as it is. Other exits for one "
            f"server: exitserve serve {model} --exit-layers N,N."
        )
    check_family(config.get("model_type"))
    num_layers = num_layers_of(config)
    named = config.get(ALIGNED_LAYERS)
    if given is None and isinstance(named, list):
        # Depths in any order, the last layer among them.
        given = sorted({layer for layer in named if layer != num_layers})
    if not given:
        raise ExitServeError(
            f"'{model}' names no exits; give --exit-layers with depths below {num_layers} that "
            f"were trained as exits, such as --exit-layers {max(num_layers // 4, 1)}."
        )
    return check_exit_layers(given, num_layers)


def check_shared_head(tensors: Sequence[StoredTensor]) -> None:
    """Raises `ExitServeError` for a tensor that is no part of a decoder with one norm and head."""
    for tensor in tensors:
        in_layer = layer_of(tensor.name) is not None
        known = not _OF_AN_EXIT.search(tensor.name) if in_layer else _SHARED.search(tensor.name)
        if not known:
            raise ExitServeError(
                f"tensor '{tensor.name}' is no part of a decoder with one norm and one head. Exits "
                f"with heads of their own cannot be served; train exits that share the head "
                f"instead: exitserve train with objectives: [aligned]."
            )


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as plain transformers and vLLM know it."""
    plain = {key: value for key, value in config.items() if key not in (ALIGNED_LAYERS, "auto_map")}
    names = config.get("architectures") or []
    plain["architectures"] = [PLAIN_NAMES.get(name, name) for name in names]
    return plain
