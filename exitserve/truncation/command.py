"""The command. Light to import: torch is loaded once the arguments are checked."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exitserve.arguments import add_model_command, at_least, check_context, with_adapter
from exitserve.checkpoint.block import context_length_of, num_layers_of, read_config
from exitserve.checkpoint.first_layers import check_depth, doubt, trained_depths
from exitserve.costs.byte_costs import serving_dtype
from exitserve.errors import ExitServeError

if TYPE_CHECKING:
    from exitserve.truncation.fit import Sizes
    from exitserve.truncation.job import TruncationJob

DESCRIPTION = """\
Write the first layers of a checkpoint, with the same norm and head, as a checkpoint of its own.

The result is an ordinary Hugging Face directory for plain transformers, plain vLLM and exitserve,
with fewer weights and a smaller key-value cache. Nothing is trained: it predicts what the full
model's head predicts after that many layers, so cut at a layer that was trained as an exit.

  exitserve truncate MODEL --layers 8 --out DIR
  exitserve truncate MODEL --to-fit 8GiB --context 4096 --requests 16 --out DIR
"""
DEFAULT_CONTEXT = 4096


def add_truncate(subparsers: Any) -> None:
    """Adds the `truncate` command."""
    parser = add_model_command(
        subparsers,
        "truncate",
        _truncate,
        help="write the first layers as a shallower, ordinary checkpoint",
        description=DESCRIPTION,
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="a new folder")
    depth = parser.add_argument_group("how deep (one of these)")
    depth.add_argument("--layers", type=int, metavar="N", help="keep the first N layers")
    depth.add_argument(
        "--to-fit",
        metavar="SIZE",
        help="keep as many layers as fit this memory with weights and cache, such as 8GiB; where "
        "a checkpoint names exit layers, one of those or all",
    )
    load = parser.add_argument_group("what the memory must hold (with --to-fit)")
    load.add_argument(
        "--context",
        type=int,
        metavar="TOKENS",
        help=f"context of each request (default {DEFAULT_CONTEXT}, or the model's if shorter)",
    )
    load.add_argument(
        "--requests", type=int, default=1, metavar="R", help="requests at the same time (default 1)"
    )
    parser.add_argument(
        "--data",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="text or .jsonl on which to measure perplexity, for the model card",
    )


def _truncate(args: argparse.Namespace) -> int:
    _check(args)
    from rich.console import Console

    from exitserve.reporting.progress import byte_bar
    from exitserve.reporting.report import terminal_table
    from exitserve.truncation.fit import depth_table
    from exitserve.truncation.run import truncate

    args = with_adapter(args)
    job, sizes, budget = _job(args)
    console = Console()
    # Before anything is written, so that a user can stop a wrong choice.
    depths = sorted({*trained_depths(job.config), job.num_layers, len(sizes.layers)})
    context = _context(args, job.config)
    headers, rows = depth_table(sizes, depths, budget, context)
    title = f"{Path(args.model).name} in {serving_dtype(job.config)}"
    console.print(terminal_table(title, headers, rows))
    if warning := doubt(job.config, job.num_layers):
        console.print(warning, style="yellow", soft_wrap=True)
    total = sum(tensor.num_bytes for tensor in job.weights.first(job.num_layers).tensors)
    with byte_bar("writing", total) as advance:
        perplexity = truncate(job, advance)
    if perplexity is not None:
        console.print(f"Perplexity at this depth: {perplexity.value:.3f}")
    full = len(sizes.layers)
    console.print(f"{job.num_layers} of {full} layers: {args.out}", soft_wrap=True)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises `ExitServeError` for options that contradict each other or are out of range."""
    if (args.layers is None) == (args.to_fit is None):
        raise ExitServeError("give one of --layers N and --to-fit SIZE.")
    at_least(1, args.requests, "--requests")
    if args.context is not None:
        at_least(1, args.context, "--context")
    for path in args.data:
        if not path.is_file():
            raise ExitServeError(f"no data file at '{path}'.")


def _job(args: argparse.Namespace) -> tuple[TruncationJob, Sizes, int | None]:
    """The job, the sizes of the full model, and the budget in bytes of `--to-fit`."""
    from exitserve.checkpoint.files import check_new_folder
    from exitserve.checkpoint.hub import local_checkpoint
    from exitserve.checkpoint.weights import read_weights
    from exitserve.truncation.fit import Load, deepest_fit, parse_size, sizes_of
    from exitserve.truncation.job import TruncationJob, check_causal, check_names

    budget = None if args.to_fit is None else parse_size(args.to_fit)
    config = read_config(args.model, args.revision)
    check_causal(config)
    full = num_layers_of(config)
    if args.layers is not None:
        check_depth(args.layers, config)
    check_new_folder(Path(args.out))
    directory = local_checkpoint(args.model, args.revision)
    weights = read_weights(directory)
    check_names(weights, full)
    sizes = sizes_of(config, weights.tensors, serving_dtype(config))
    layers = args.layers
    if budget is not None:
        load = Load(requests=args.requests, context=_context(args, config))
        layers = deepest_fit(sizes, trained_depths(config) or range(1, full + 1), budget, load)
    job = TruncationJob(
        model=args.model,
        directory=directory,
        config=config,
        weights=weights,
        num_layers=layers,
        out=Path(args.out),
        data=args.data,
    )
    return job, sizes, budget


def _context(args: argparse.Namespace, config: Mapping[str, Any]) -> int:
    """Tokens of a request, as given or by default."""
    if args.context is None:
        return min(DEFAULT_CONTEXT, context_length_of(config) or DEFAULT_CONTEXT)
    return check_context(args.context, config, "--context")
