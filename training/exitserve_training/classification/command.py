"""The command. Light to import: torch is loaded once the arguments are known."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from exitserve.errors import ExitServeError

if TYPE_CHECKING:
    from exitserve_training.classification.evaluation import ClassificationSettings

_HELP = """\
Runs a classifier (BERT on texts, ViT or DeiT on images) over a file with early exit: an input
stops at the first exit layer where it is confident enough, and the others go on without it.
Writes predictions.jsonl, report.json and report.md, with the time of the full model on
the same batches beside it."""
_EXAMPLES = """\
examples:
  a table of texts with their classes, at two thresholds:
    python -m exitserve_training.classification runs/sst2 --data test.tsv --text-field sentence \\
      --exit-threshold 0.9,0.97 --out runs/sst2-exits
  images in folders named after their classes:
    ... runs/vit --data images/test --exit-threshold 0.9 --out runs/vit-exits
  texts without classes: only predictions, no accuracy:
    ... runs/sst2 --data reviews.jsonl --exit-threshold 0.9 --out runs/reviews
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m exitserve_training.classification",
        description=_HELP,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a classifier: directory or hub id")
    parser.add_argument("--out", required=True, metavar="DIR", help="where the report goes")
    parser.add_argument("--overwrite", action="store_true", help="replace a report in DIR")
    parser.add_argument(
        "--exit-threshold",
        metavar="T[,T]",
        help="an input stops where its confidence is above this; predictions are those of the "
        "first (default 0.9)",
    )
    parser.add_argument(
        "--exit-layers", metavar="N,N", help="where inputs may stop (default: the checkpoint's)"
    )
    parser.add_argument("--batch-size", type=int, default=32, help="inputs at a time (default 32)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed rounds, after one that warms up (default 3)"
    )
    add_data_arguments(parser)
    parser.set_defaults(run=_classify)
    return parser


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for labelled data, which inspections take too."""
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data", required=True, nargs="+", metavar="FILE", help="files, globs, or image folders"
    )
    data.add_argument("--text-field", metavar="NAME", help="column of the text (default text)")
    data.add_argument("--pair-field", metavar="NAME", help="column of a second text")
    data.add_argument("--label-field", metavar="NAME", help="column of the class (default label)")
    data.add_argument(
        "--columns", metavar="NAME,NAME", help="names of the columns of a file without a header"
    )


def data_fields(args: argparse.Namespace) -> dict[str, Any]:
    """What `add_data_arguments` was given, as a recipe's `data` names it."""
    fields = {name: getattr(args, name) for name in ("text_field", "pair_field", "label_field")}
    fields["columns"] = args.columns.split(",") if args.columns else None
    return {name: value for name, value in fields.items() if value is not None}


def numbers(text: str, option: str, kind: type[int] | type[float]) -> list[Any]:
    """Comma-separated numbers; raises `ExitServeError` that names the option."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ExitServeError(
            f"{option} {text!r} must be numbers with commas between, such as "
            f"{'0.8,0.9' if kind is float else '3,6'}."
        ) from error


def _classify(args: argparse.Namespace) -> int:
    thresholds = numbers(args.exit_threshold or "0.9", "--exit-threshold", float)
    for threshold in thresholds:
        if not 0.0 <= threshold <= 1.0:
            raise ExitServeError(
                f"--exit-threshold {threshold:g} is not between 0 and 1; 1 means that none stops."
            )
    for option in ("batch_size", "repeats"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise ExitServeError(f"--{option.replace('_', '-')} {value} must be at least 1.")
    layers = numbers(args.exit_layers, "--exit-layers", int) if args.exit_layers else None
    from exitserve_training.classification.evaluation import ClassificationSettings

    settings = ClassificationSettings(
        model=args.model,
        data=args.data,
        thresholds=thresholds,
        batch_size=args.batch_size,
        repeats=args.repeats,
        exit_layers=layers,
        fields=data_fields(args),
    )
    return _classify_with_exits(args, settings)


def _classify_with_exits(args: argparse.Namespace, settings: ClassificationSettings) -> int:
    from exitserve.reporting.report import prepare_out_dir, write_report
    from exitserve_training.classification.evaluation import classify
    from exitserve_training.classification.page import HEADERS, markdown, rows

    out = prepare_out_dir(args.out, overwrite=args.overwrite)
    found = classify(settings)
    write_report(out, found.report, markdown(found.report), {})
    found.write_predictions(out / "predictions.jsonl")
    _print(found.report, HEADERS, rows(found.report), f"Report and predictions: {out}")
    return 0


def _print(
    report: dict[str, Any], headers: Sequence[str], lines: list[list[str]], where: str
) -> None:
    from rich.console import Console

    from exitserve.reporting.report import terminal_table

    console = Console()
    title = f"{report['inputs']:,} inputs, {report['model']}"
    console.print(terminal_table(title, headers, lines))
    console.print(where, soft_wrap=True)
