"""The command. Light to import: torch is loaded once the arguments are known."""

import argparse

from exitserve.arguments import add_adapter, add_out_flags, at_least, with_adapter
from exitserve.checkpoint.block import read_config
from exitserve.errors import ExitServeError
from exitserve_training.classification.command import add_data_arguments, settings_of

_HELP = """\
Looks into a checkpoint, layer by layer: accuracy and perplexity through the shared head, linear
probes, similarity of layers (COS, CKA), neural collapse (NC1), condensation of token states,
effective rank, margins and contrastive similarity (SimReg), the minimal depth for a share of full
accuracy; with --prompts also what the model writes when it is cut at each exit layer. Works on
language models, masked ones, and classifiers. Writes report.json, report.md and plots."""
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
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="weights"
    )
    add_out_flags(parser)
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
        "--sequence-length",
        dest="length",
        type=int,
        help="tokens of a sequence of text (default 256)",
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
    for name in ("rows", "samples", "batch_size", "prompt_tokens", "new_tokens"):
        at_least(1, getattr(args, name), f"--{name.replace('_', '-')}")
    at_least(2, 2 if args.length is None else args.length, "--sequence-length")
    at_least(0, args.prompts, "--prompts")
    if args.sentence_model and not args.prompts:
        raise ExitServeError("--sentence-model measures what --prompts writes; give --prompts.")
    from exitserve.reporting.report import prepare_out_dir, publish, terminal_table
    from exitserve_training.inspect.data import InspectionSettings
    from exitserve_training.inspect.inspection import inspect
    from exitserve_training.inspect.page import markdown, summary, table

    out = prepare_out_dir(args.out, overwrite=args.overwrite)
    found = inspect(settings_of(args, InspectionSettings))
    report = found.report
    # As many columns as a terminal has room for.
    shown = [terminal_table(report["model"], *table(report, 10)), summary(report)]
    publish(out, report, markdown(report), found.figures, shown)
    return 0


def _is_classifier(model: str) -> bool:
    """Whether a checkpoint is one of a classifier."""
    names = read_config(model).get("architectures") or []
    return any(str(name).endswith("Classification") for name in names)
