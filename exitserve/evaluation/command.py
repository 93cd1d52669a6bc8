"""The command: from arguments to a job, the evaluation and a report.

Light to import: torch and transformers are loaded only once the arguments are known to be good.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from exitserve.arguments import (
    DEFAULT_THRESHOLDS,
    add_model_command,
    add_out_flags,
    add_threshold_flags,
    any_mode,
    at_least,
    calibrated_rows,
    check_context,
    modes_of,
    thresholds_of,
    with_adapter,
)
from exitserve.checkpoint.block import read_config
from exitserve.engine.launch import check_rules, served_architecture
from exitserve.errors import ExitServeError
from exitserve.evaluation.settings import EvalJob
from exitserve.settings import make_settings

RESEARCH = {"prompt_tokens": 32}
"""Of each window, at full depth."""

_HELP = """\
Measures what early exit does to quality, at every threshold: perplexity and agreement with full
depth on held-out text, exactly, in float32, with the mean depth. Writes report.json, report.md and
a plot. Nothing is timed: `exitserve bench` does that.

With --prompt also what every exit layer says to each token of an answer, as a file for the
playground (`exitserve serve --playground`): drop it there."""
_EXAMPLES = """\
examples:
  held-out text, at three thresholds in two modes:
    exitserve eval MODEL --data heldout.txt --thresholds 0.5,0.7,0.9 --modes confidence,defer \\
      --out DIR
  the thresholds that `exitserve calibrate` found:
    exitserve eval MODEL --data heldout.txt --thresholds auto --out DIR
  why each token of one answer stops where it does:
    exitserve eval MODEL --prompt "def read(path):" --thresholds 0.5 --out DIR"""


def add_command(subparsers: Any) -> None:
    """Adds `eval` to the subparsers of the command line."""
    parser = add_model_command(
        subparsers,
        "eval",
        run,
        help="measure quality against depth: perplexity, agreement, and why tokens stop",
        description=_HELP,
        epilog=_EXAMPLES,
    )
    add_out_flags(parser)
    exits = parser.add_argument_group("what is compared with full depth")
    add_threshold_flags(exits, default=DEFAULT_THRESHOLDS)
    text = parser.add_argument_group("text")
    text.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help='held out: text, blank lines between documents; or .jsonl with "text"',
    )
    text.add_argument(
        "--window",
        type=int,
        default=256,
        metavar="N",
        help=f"tokens of it that are read at a time, the first {RESEARCH['prompt_tokens']} at full "
        "depth (%(default)s)",
    )
    text.add_argument(
        "--windows", type=int, default=64, metavar="N", help="at most so many (%(default)s)"
    )
    text.add_argument("--prompt", metavar="TEXT", help="a text to continue, for traces")
    parser.set_defaults(**RESEARCH)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code.

    Raises:
        ExitServeError: an argument is wrong.
    """
    job = job_of(args)
    from exitserve.evaluation.run import evaluate, write_traces
    from exitserve.evaluation.settings import SEED, TRACED_TOKENS
    from exitserve.reference import load_reference
    from exitserve.reporting.engine_logs import redirect_stderr, visible_stderr
    from exitserve.reporting.progress import share_bar
    from exitserve.reporting.report import prepare_out_dir
    from exitserve.windows import load_tokenizer, windows_of

    tokenizer = load_tokenizer(job.directory)
    windows = []
    if job.documents is not None:
        windows = windows_of(job.documents, tokenizer, job.window, job.windows, SEED)
    if job.prompt is not None:
        length = len(tokenizer(job.prompt, verbose=False).input_ids) + TRACED_TOKENS
        check_context(length, read_config(job.directory), f"the prompt and {TRACED_TOKENS} tokens,")
    out = prepare_out_dir(args.out, overwrite=args.overwrite)
    data, traces = None, list[Path]()
    # What libraries write to the error stream goes to a log.
    with (
        visible_stderr() as screen,
        redirect_stderr(out / "eval.log"),
        share_bar(screen) as progress,
    ):
        progress("loading the model in float32", 0.0)
        reference = load_reference(str(job.directory), exit_rows=job.exit_rows, device="auto")
        if windows:
            data = evaluate(job, reference, windows, progress)
        if job.prompt is not None:
            traces = list(write_traces(job, reference, tokenizer, out))
    for file in traces:
        print(f"{file}: drop it on the playground of a server to look at it.")
    if data is not None:
        _publish(out, data)
    return 0


def job_of(args: argparse.Namespace) -> EvalJob:
    """The job that the arguments ask for.

    Raises:
        ExitServeError: an argument is wrong.
    """
    from exitserve.checkpoint.hub import local_checkpoint
    from exitserve.windows import read_documents

    if args.data is None and not args.prompt:
        raise ExitServeError("give held-out text (--data FILE), a prompt (--prompt TEXT), or both.")
    args = with_adapter(args)
    served_architecture(args.model, args.revision)
    config = read_config(args.model, args.revision)
    modes = modes_of(args.modes)
    exit_rows = calibrated_rows(config)
    options = {"exit_rows": exit_rows, "mode": "off"}
    rules = any_mode(check_rules(args.model, options, args.revision))
    settings = make_settings(rules, thresholds_of(args.thresholds), modes)
    if len(settings) == 1:
        raise ExitServeError("--thresholds names none; give numbers below 1, or auto.")
    # At least one token is decoded, and one more is there to be predicted.
    window = at_least(args.prompt_tokens + 2, args.window, "--window")
    check_context(window, config, "--window")
    return EvalJob(
        model=args.model_name,
        directory=local_checkpoint(args.model, args.revision),
        rules=rules,
        exit_rows=exit_rows,
        settings=settings,
        documents=None if args.data is None else read_documents(args.data),
        window=window,
        prompt_tokens=args.prompt_tokens,
        windows=at_least(1, args.windows, "--windows"),
        prompt=args.prompt or None,
    )


def _publish(out: Path, data: dict[str, Any]) -> None:
    from exitserve.evaluation import page
    from exitserve.reporting.report import publish, terminal_table

    shown = [terminal_table(page.title_of(data), *page.text_table(data["cases"]))]
    if data["drafting"]:
        shown.append(terminal_table(page.DRAFTING_TITLE, *page.drafting_table(data)))
    warning = f"Warning: {page.warning_of(data)}"
    publish(out, data, page.markdown(data), {"retention": page.plot(data)}, [*shown, warning])
