"""The command: from arguments to the costs of a step, and a report.

Light to import: torch is loaded only where something is measured.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from math import inf
from pathlib import Path
from typing import Any

from exitserve.arguments import add_model_command, add_out_flags, batch_sizes_of
from exitserve.checkpoint.block import (
    check_exit_layers,
    parse_multi_exit,
    read_config,
    read_json_object,
)
from exitserve.costs.byte_costs import DTYPE_BYTES, shape_of
from exitserve.costs.devices import CPU, DEVICES, Device
from exitserve.errors import ExitServeError

MAX_BATCH_SIZE = 512

_HELP = """\
Times the parts of a decode step on this machine, on matrices of the model's shapes (or takes a
GPU's figures from a table), and shows what exits can give: the cost of a check in layers, for each
exit layer the break-even share of tokens and the largest possible wall speedup, and which exit
layers to train. Needs only a config.json, no weights."""
_EXAMPLES = """\
examples:
  exitserve plan MODEL                                  a directory, a config.json, or a hub id
  exitserve plan config.json --device h200 --context 4096
  exitserve plan MODEL --batch-sizes 1,8 --out DIR"""


def add_command(subparsers: Any) -> None:
    """Adds `plan` to the subparsers of the command line."""
    parser = add_model_command(
        subparsers,
        "plan",
        run,
        model="a checkpoint directory, config.json or hub id",
        adapter=False,
        help="what exits can give on this machine, before any training",
        description=_HELP,
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "--batch-sizes",
        default="1,8,32",
        metavar="B,B",
        help="requests decoding together, the most important first (default %(default)s)",
    )
    parser.add_argument(
        "--context",
        type=int,
        default=0,
        metavar="N",
        help="tokens that each request's attention reads (default 0: short)",
    )
    parser.add_argument(
        "--exit-share",
        type=float,
        default=0.5,
        metavar="S",
        help="share of tokens assumed to exit early (default %(default)s)",
    )
    parser.add_argument(
        "--device",
        type=str.lower,
        metavar="NAME",
        help=f"use figures instead of timing: {'|'.join((*DEVICES, CPU))}",
    )
    own = "of an accelerator that --device does not know"
    parser.add_argument("--bandwidth", type=float, metavar="GB/S", help=f"memory {own}")
    parser.add_argument("--tflops", type=float, metavar="T", help=f"bfloat16 {own}")
    parser.add_argument(
        "--dtype", default="auto", metavar="TYPE", help=f"auto|{'|'.join(DTYPE_BYTES)}"
    )
    add_out_flags(parser, required=False)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code.

    Raises:
        ExitServeError: an argument is wrong.
    """
    config = read_model(args.model, args.revision)
    batch_sizes = batch_sizes_of(args.batch_sizes)
    if max(batch_sizes) > MAX_BATCH_SIZE:
        raise ExitServeError(
            f"--batch-sizes must be at most {MAX_BATCH_SIZE}, not {max(batch_sizes)}."
        )
    if not 0 < args.exit_share <= 1:
        raise ExitServeError(f"--exit-share must be above 0, up to 1, not {args.exit_share:g}.")
    block = parse_multi_exit(config)
    # Refuses unknown shapes and exits that do not fit, before anything is timed.
    num_layers = shape_of(config, "bfloat16").num_layers
    check_exit_layers(block.exit_layers if block else (), num_layers)
    device = _device(args)

    from exitserve.costs.sources import step_costs
    from exitserve.planning.run import make_plan
    from exitserve.reporting.progress import share_bar
    from exitserve.reporting.report import prepare_out_dir

    out = None if args.out is None else prepare_out_dir(args.out, overwrite=args.overwrite)
    with share_bar(transient=True) if device is None else nullcontext(lambda *_: None) as progress:
        costs = step_costs(
            config,
            dtype=args.dtype,
            batch_sizes=batch_sizes,
            context=args.context,
            device=device,
            progress=lambda done: progress("timing the parts of a step", done),
        )
    data = make_plan(
        costs,
        model=args.model,
        batch_sizes=batch_sizes,
        context=args.context,
        exit_share=args.exit_share,
        block=block,
    )
    _publish(data, out)
    return 0


def read_model(model: str, revision: str | None = None) -> dict[str, Any]:
    """The `config.json` of a directory, a hub id, or the file itself.

    Raises:
        ExitServeError: there is none, or it is no JSON object.
    """
    if Path(model).is_file():
        return read_json_object(Path(model), f"no file at '{model}'.")
    return read_config(model, revision)


def _device(args: argparse.Namespace) -> str | Device | None:
    """What to take figures of; None to time this machine."""
    figures = args.bandwidth, args.tflops
    if figures == (None, None):
        return None if args.device is None else str(args.device)
    if args.device is not None or not all(one is not None and 0 < one < inf for one in figures):
        raise ExitServeError("give --bandwidth and --tflops above 0, both, and no --device.")
    return Device(1e9 * args.bandwidth, 1e12 * args.tflops)


def _publish(data: dict[str, Any], out: Path | None) -> None:
    from exitserve.planning import page
    from exitserve.reporting.report import publish, terminal_table

    shown: list[object] = [*page.summary(data)]
    for title, table, legend in page.tables(data):
        shown += [terminal_table(title, *table), *filter(None, [legend])]
    shown += [*page.recommendation(data), *(f"Note: {note}" for note in data["notes"])]
    publish(out, data, page.markdown(data), {"plan": page.plot(data)}, shown)
