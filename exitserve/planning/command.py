"""`exitserve plan`: what exits can give on this machine, before anything is trained.

Light to import: torch is loaded only where something is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from exitserve.arguments import at_least, numbers
from exitserve.bench import synthetic
from exitserve.checkpoint import check_exit_layers, parse_multi_exit
from exitserve.costs import DTYPE_BYTES, shape_of
from exitserve.errors import ExitServeError
from exitserve.planning.devices import DEVICES
from exitserve.planning.sources import MOST_ROWS, read_model

SHOWN_SIZES = 3
"""Batch sizes in the terminal table, which fits 80 characters; the page has them all."""

_HELP = """\
Times the parts of a decode step on this machine, for matrices of the model's shapes (or takes a
GPU's figures from a table), and tells what exits can give: the cost of a check in layers, for each
exit layer the break-even share of tokens and the most that wall speedup can be, and which exit
layers to train. Needs a config.json only, no weights."""
_EXAMPLES = """\
examples:
  exitserve plan MODEL                                  a directory, a config.json, or a hub id
  exitserve plan config.json --device h200 --context 4096
  exitserve plan --synthetic llama-1.3b --batch-sizes 1,8 --out DIR"""


def add_command(subparsers: Any) -> None:
    """Adds `plan` to the subparsers of the command line."""
    parser = subparsers.add_parser(
        "plan",
        help="what exits can give on this machine, before any training",
        description=_HELP,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a checkpoint directory, config.json or hub id"
    )
    parser.add_argument(
        "--synthetic", metavar="NAME", help=f"instead: {'|'.join(synthetic.SHAPES)}"
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
        help="tokens that attention reads (default 0: short)",
    )
    parser.add_argument(
        "--exit-share",
        type=float,
        default=0.5,
        metavar="S",
        help="share of tokens that is assumed to leave early (default %(default)s)",
    )
    parser.add_argument(
        "--device", metavar="NAME", help=f"a GPU's figures, nothing measured: {'|'.join(DEVICES)}"
    )
    parser.add_argument(
        "--dtype", default="auto", metavar="TYPE", help=f"auto|{'|'.join(DTYPE_BYTES)}"
    )
    parser.add_argument(
        "--step-overhead-ms",
        type=float,
        metavar="MS",
        help="of a step outside the model, instead of what is known of the engine",
    )
    parser.add_argument("--out", metavar="DIR", help="also write a report there")
    parser.add_argument("--overwrite", action="store_true", help="replace a report in DIR")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code.

    Raises:
        ExitServeError: an argument is wrong.
    """
    config, name = _model_of(args)
    batch_sizes = _batch_sizes(args.batch_sizes)
    if not 0 < args.exit_share <= 1:
        raise ExitServeError(f"--exit-share must be above 0, up to 1, not {args.exit_share:g}.")
    overhead = args.step_overhead_ms
    if overhead is not None and overhead < 0:
        raise ExitServeError(f"--step-overhead-ms must be 0 or more, not {overhead:g}.")
    block = parse_multi_exit(config)
    own_layers = block.exit_layers if block else ()
    # Now, before anything is timed: a shape that is not known, or exits that do not fit it.
    check_exit_layers(own_layers, shape_of(config, "bfloat16").num_layers)

    from exitserve.planning.run import make_plan
    from exitserve.planning.sources import step_costs
    from exitserve.report import prepare_out_dir

    out = None if args.out is None else prepare_out_dir(args.out, overwrite=args.overwrite)

    def costs(progress: Callable[[float], None]) -> Any:
        return step_costs(
            config,
            dtype=args.dtype,
            batch_sizes=batch_sizes,
            context=args.context,
            device=args.device,
            overhead=None if overhead is None else overhead / 1e3,
            progress=progress,
        )

    data = make_plan(
        costs(lambda done: None) if args.device else _with_progress(costs),
        model=name,
        batch_sizes=batch_sizes,
        context=args.context,
        exit_share=args.exit_share,
        own_layers=own_layers,
    )
    _publish(data, out)
    return 0


def _model_of(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The parsed config and the model's name."""
    if (args.model is None) == (args.synthetic is None):
        raise ExitServeError("give either MODEL or --synthetic NAME.")
    if args.synthetic is None:
        return read_model(args.model), args.model
    synthetic.check_name(args.synthetic)
    return synthetic.SHAPES[args.synthetic], f"synthetic {args.synthetic}"


def _batch_sizes(text: str) -> tuple[int, ...]:
    sizes = [at_least(1, size, "--batch-sizes") for size in numbers(text, int, "--batch-sizes")]
    if not sizes or len(set(sizes)) != len(sizes):
        raise ExitServeError(f"--batch-sizes {text!r} must name sizes, each once.")
    if max(sizes) > MOST_ROWS:
        raise ExitServeError(f"--batch-sizes must be at most {MOST_ROWS}, not {max(sizes)}.")
    return tuple(sizes)


def _with_progress(measure: Callable[[Callable[[float], None]], Any]) -> Any:
    """Runs a measurement under a bar, on the error stream."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task("timing the parts of a step", total=1.0)
        return measure(lambda done: bar.update(task, completed=done))


def _publish(data: dict[str, Any], out: Any) -> None:
    from rich.console import Console

    from exitserve.planning import page
    from exitserve.report import terminal_table, write_report

    console = Console()
    for line in page.summary(data):
        console.print(line, highlight=False)
    headers, rows = page.layer_headers(data, SHOWN_SIZES), page.layer_rows(data, SHOWN_SIZES)
    console.print(terminal_table("Exit layers, one at a time (* the best)", headers, rows))
    console.print(page.LEGEND, highlight=False)
    choices = page.choice_rows(data)
    console.print(terminal_table("Exit layers together", page.choice_headers(data), choices))
    console.print(page.recommendation(data), highlight=False)
    for note in data["notes"]:
        console.print(f"Note: {note}", highlight=False)
    if out is not None:
        write_report(out, data, page.markdown(data), {"plan": page.plot(data)})
        console.print(f"Report: {out / 'report.md'}")
