"""The command. Light to import: torch is loaded once the arguments are known."""

import argparse
import dataclasses
from typing import Any, TypeVar

from exitserve.arguments import add_out_flags, at_least, numbers, words
from exitserve.errors import ExitServeError

Settings = TypeVar("Settings")

_OF_DATASET = ("dataset=", "dataset_config=", "split=")

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
    add_out_flags(parser)
    parser.add_argument(
        "--exit-threshold",
        metavar="T[,T]",
        default="0.9",
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
        "--data",
        required=True,
        nargs="+",
        metavar="FILE",
        help="files, globs, image folders; or dataset=ID split=NAME, as in a recipe's data",
    )
    data.add_argument("--text-field", metavar="NAME", help="column of the text (default text)")
    data.add_argument("--pair-field", metavar="NAME", help="column of a second text")
    data.add_argument("--label-field", metavar="NAME", help="column of the class (default label)")
    data.add_argument(
        "--columns", metavar="NAME,NAME", help="names of the columns of a file without a header"
    )


def settings_of(args: argparse.Namespace, kind: type[Settings], **more: Any) -> Settings:
    """A command's settings: its arguments by name, and `fields` as a recipe's `data` has them.

    Args:
        args: of the command, with those of `add_data_arguments`.
        kind: a dataclass.
        **more: settings that are no arguments.
    """
    files = [one for one in args.data if not one.startswith(_OF_DATASET)]
    given: dict[str, Any] = {**vars(args), "data": files}
    fields = {name: given[name] for name in ("text_field", "pair_field", "label_field")}
    fields["columns"] = words(args.columns) if args.columns else None
    fields |= dict(one.split("=", 1) for one in args.data if one not in files)
    more["fields"] = {name: value for name, value in fields.items() if value is not None}
    names = [one.name for one in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: given[name] for name in names if name in given} | more)


def _classify(args: argparse.Namespace) -> int:
    thresholds = numbers(args.exit_threshold, float, "--exit-threshold")
    for threshold in thresholds:
        if not 0.0 <= threshold <= 1.0:
            raise ExitServeError(
                f"--exit-threshold {threshold:g} is not between 0 and 1; 1 means that none stops."
            )
    at_least(1, args.batch_size, "--batch-size")
    at_least(1, args.repeats, "--repeats")
    args.exit_layers = numbers(args.exit_layers or "", int, "--exit-layers") or None
    from exitserve.reporting.report import prepare_out_dir, publish, terminal_table
    from exitserve_training.classification.evaluation import ClassificationSettings, classify
    from exitserve_training.classification.page import HEADERS, markdown, rows

    out = prepare_out_dir(args.out, overwrite=args.overwrite)
    found = classify(settings_of(args, ClassificationSettings, thresholds=thresholds))
    found.write_predictions(out / "predictions.jsonl")
    title = f"{found.report['inputs']:,} inputs, {found.report['model']}"
    table = terminal_table(title, HEADERS, rows(found.report))
    publish(out, found.report, markdown(found.report), {}, [table])
    return 0
