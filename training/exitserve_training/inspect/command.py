"""The command. Light to import: torch is loaded once the arguments are known."""

from __future__ import annotations

import argparse

from exitserve.arguments import add_adapter, with_adapter
from exitserve.checkpoint.block import read_config
from exitserve.errors import ExitServeError
from exitserve_training.classification.command import add_data_arguments, data_fields

_HELP = """\
Looks into a checkpoint, layer by layer: accuracy and perplexity through the shared head, linear
probes, similarity of layers (COS, CKA), neural collapse (NC1), condensation of token states,
effective rank, the minimal depth for a share of full accuracy; with --prompts also what the model
writes when it is cut at each exit layer. Works on language models, masked ones, and classifiers.
Writes report.json, report.md and plots."""
_EXAMPLES = """\
examples:
  a decoder, on a text:
    python -m exitserve_training.inspect models/exit-py-19m --data "exitserve/*.py" --out DIR
  what it writes at each exit, and how well that fits (any sentence-embedding model):
    ... MODEL --data book.txt --prompts 20 --sentence-model PATH --out DIR
  a classifier of texts, or of images in folders of their classes:
    ... runs/sst2 --data test.tsv --text-field sentence --out DIR
    ... runs/vit --data images/test --rows 1000 --out DIR
"""


ROWS, SAMPLES = 50, 1500
"""How much is measured; nearly all of the time is in proportion to it."""
CLASSIFIED_ROWS = 200
"""Of a classifier each row is one position only, of which probes need many."""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m exitserve_training.inspect",
        description=_HELP,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a checkpoint: directory or hub id")
    add_adapter(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="where the report goes")
    parser.add_argument("--overwrite", action="store_true", help="replace a report in DIR")
    add_data_arguments(parser)
    sizes = parser.add_argument_group("how much")
    sizes.add_argument(
        "--rows",
        type=int,
        help=f"sequences, or inputs to classify (default {ROWS}, or {CLASSIFIED_ROWS})",
    )
    sizes.add_argument(
        "--samples",
        type=int,
        default=SAMPLES,
        help=f"positions that compare layers (default {SAMPLES})",
    )
    sizes.add_argument(
        "--sequence-length", type=int, help="tokens of a sequence of text (default 256)"
    )
    sizes.add_argument("--batch-size", type=int, default=8, help="inputs at a time (default 8)")
    sizes.add_argument("--seed", type=int, default=0, help="of what is drawn (default 0)")
    texts = parser.add_argument_group("what it writes")
    texts.add_argument("--prompts", type=int, default=0, help="texts to continue (default none)")
    texts.add_argument("--prompt-tokens", type=int, default=32, help="their length (default 32)")
    texts.add_argument("--new-tokens", type=int, default=64, help="to write (default 64)")
    texts.add_argument(
        "--sentence-model", metavar="PATH", help="embeds prompts and texts, for coherence"
    )
    parser.set_defaults(run=_inspect)
    return parser


def _inspect(args: argparse.Namespace) -> int:
    args = with_adapter(args)
    if args.rows is None:
        args.rows = CLASSIFIED_ROWS if _is_classifier(args.model) else ROWS
    _check(args)
    from rich.console import Console

    from exitserve.reporting.report import prepare_out_dir, terminal_table, write_report
    from exitserve_training.inspect.inspection import InspectionSettings, inspect
    from exitserve_training.inspect.page import HEADERS, markdown, rows, summary

    out = prepare_out_dir(args.out, overwrite=args.overwrite)
    found = inspect(
        InspectionSettings(
            model=args.model,
            data=args.data,
            fields=data_fields(args),
            rows=args.rows,
            samples=args.samples,
            length=args.sequence_length,
            batch_size=args.batch_size,
            seed=args.seed,
            prompts=args.prompts,
            prompt_tokens=args.prompt_tokens,
            new_tokens=args.new_tokens,
            sentence_model=args.sentence_model,
        )
    )
    write_report(out, found.report, markdown(found.report), found.figures)
    console = Console()
    console.print(terminal_table(f"{found.report['model']}", HEADERS, rows(found.report)))
    console.print(summary(found.report), soft_wrap=True)
    console.print(f"Report and plots: {out}", soft_wrap=True)
    return 0


def _is_classifier(model: str) -> bool:
    """Whether a checkpoint is one of a classifier."""
    names = read_config(model).get("architectures") or []
    return any(str(name).endswith("Classification") for name in names)


def _check(args: argparse.Namespace) -> None:
    """Raises `ExitServeError` for numbers that cannot be."""
    for option in ("rows", "samples", "batch_size", "prompt_tokens", "new_tokens"):
        value = getattr(args, option)
        if value < 1:
            raise ExitServeError(f"--{option.replace('_', '-')} {value} must be at least 1.")
    if args.sequence_length is not None and args.sequence_length < 2:
        raise ExitServeError(f"--sequence-length {args.sequence_length} must be at least 2.")
    if args.prompts < 0:
        raise ExitServeError(f"--prompts {args.prompts} must be 0 or more.")
    if args.sentence_model and not args.prompts:
        raise ExitServeError("--sentence-model measures what --prompts writes; give --prompts.")
