"""The command `exitserve train`. Light to import.

What is heavy is imported when a command runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from exitserve.errors import ExitServeError, install

if TYPE_CHECKING:
    from exitserve_training.recipe import Recipe

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_ERROR_DELAY_S = 15.0

_STOPPED = 128 + 15
"""Exit code of a run that SIGTERM ended, as a shell tells it."""


RECIPE_HELP = """\
a recipe, with the keys most runs need:

  output_dir: runs/my-model       an ordinary Hugging Face checkpoint appears here
  model: path/or/hub-id           fine-tune this causal LM, or, from scratch:
  config: {architecture: llama, num_hidden_layers: 12, hidden_size: 256, ...}
  tokenizer: {train_bpe: {vocab_size: 4096}}      or {path: ...}; default: the model's own
  data:
    files: ["corpus/**/*.txt"]    text, .jsonl, .parquet; or dataset: a datasets id,
    sequence_length: 512          or python_source: [stdlib, site-packages]
    format: chat                  rows of messages, through the model's chat template;
                                  labelled: rows with a class; images: a folder a class
    own_chats: {count: 30000}     of chats: the model writes them itself, with vLLM
  exit_layers: [3, 6, 9]          where the model may stop; or all
  objectives: [aligned]           what to minimise; with options, and several at once:
    - {name: aligned, sample: 2}      of the exit layers, 2 drawn each step
    - {name: simreg, weight: auto}    also: dispersion, nitp, kl_to_last, headless, ...
  exit_aware: {}                  freeze positions at exits, as serving does (fine-tuning)
  lora: {rank: 16}                adapters, merged into the checkpoint at the end
  training: {max_steps: 2000, learning_rate: 1.0e-3, per_device_train_batch_size: 4}
                                  any field of transformers.TrainingArguments

examples:

  exitserve train training/recipes/tiny/aligned.yaml output_dir=runs/tiny
  exitserve train my.yaml model=Qwen/Qwen3-0.6B exit_layers=[7,14,21] bf16=true
  exitserve train my.yaml resume=true             goes on from the newest checkpoint
  exitserve train training/recipes/smollm2-135m.yaml  exits for a chat model, which needs no data
  accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 -m exitserve train my.yaml

all keys: docs/recipes.md, and --schema for editors; what objectives do: docs/training.md
"""


def add_commands(subparsers: Subparsers) -> None:
    """Adds `train` to the `exitserve` command line."""
    parser = subparsers.add_parser(
        "train",
        help="fine-tune or pretrain a decoder with several exits",
        description="Trains a decoder so that one norm and one LM head can be read after several "
        "layers, and leaves an ordinary Hugging Face checkpoint.",
        epilog=RECIPE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "recipe", nargs="?", default="", metavar="RECIPE.yaml", help="what to train, on what, how"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="replaces a recipe key, dotted where nested: training.max_steps=100",
    )
    parser.add_argument(
        "--estimate",
        action="store_true",
        help="print the memory and time that the run will take, and end",
    )
    parser.add_argument(
        "--schema",
        action="store_true",
        help="print the JSON schema of recipes, for editors, and end",
    )
    parser.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> int:
    try:
        return _train_recipe(args)
    except ExitServeError:
        if os.environ.get("RANK", "0") == "0":
            raise
        # Of several processes the first prints the error. Where another ends before it, the
        # launcher stops the first, and the message is lost.
        time.sleep(_ERROR_DELAY_S)
        return 2


def _train_recipe(args: argparse.Namespace) -> int:
    try:
        from rich.console import Console

        from exitserve_training.recipe import load_recipe

        if args.schema:
            from exitserve_training.arguments import recipe_schema

            print(json.dumps(recipe_schema(), indent=2))
            return 0
        recipe = load_recipe(args.recipe or "RECIPE.yaml", args.overrides)
        if args.estimate:
            return _print_estimate(recipe)
        # After the recipe is checked, because this takes seconds to import.
        from exitserve_training.callbacks import RunStoppedError
        from exitserve_training.folder import newest_checkpoint
        from exitserve_training.pipeline import train

        try:
            report = train(recipe)
        except RunStoppedError as stopped:
            print(f"exitserve: {stopped}", file=sys.stderr)
            return _STOPPED
        except KeyboardInterrupt:
            with suppress(ExitServeError):  # there is nothing to go on from
                kept = newest_checkpoint(Path(recipe.output_dir)) or "the chats that are written"
                resume = f"Interrupted. To go on from {kept}: the same command with resume=true."
                print(resume, file=sys.stderr)
            raise
    except ModuleNotFoundError as error:
        raise ExitServeError(
            f"training needs the package {error.name!r}: {install('train')}."
        ) from error
    if report is None:
        return 0
    console = Console()
    console.print(report.table())
    for layer, found in report.exits.items():
        console.print(f"Exit {layer} {found}.", soft_wrap=True)
    console.print(
        f"{report.steps:,} steps, {report.tokens_seen:,} tokens, {report.seconds:,.0f} s. "
        f"Checkpoint and report: {recipe.output_dir}",
        soft_wrap=True,
    )
    return 0


def _print_estimate(recipe: Recipe) -> int:
    from exitserve_training.estimate import estimate

    rows = estimate(recipe).rows()
    width = max(len(what) for what, _ in rows)
    for what, much in rows:
        print(f"{what:{width}}  {much}")
    return 0
