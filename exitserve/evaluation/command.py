"""The command: from arguments to a job, the evaluation and a report.

Light to import: torch, transformers and lm-eval are loaded only once the arguments are known to be
good.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from exitserve.arguments import (
    DEFAULT_THRESHOLDS,
    add_adapter,
    add_out_flags,
    add_revision,
    add_threshold_flags,
    at_least,
    check_context,
    check_dtype,
    modes_of,
    thresholds_of,
    verify_options,
    with_adapter,
    words,
)
from exitserve.calibration_record import EXIT_CHECKS
from exitserve.checkpoint import read_config
from exitserve.engine.launch import check_rules, served_architecture
from exitserve.errors import ExitServeError
from exitserve.evaluation.settings import EvalJob, TaskJob, make_settings

_HELP = """\
Measures what early exit does to quality, at every threshold: perplexity and agreement with full
depth on held-out text (exact, in float32), and generative tasks of lm-eval on a running server,
with the mean depth of each. Writes report.json, report.md and a plot. Nothing is timed:
`exitserve bench` does that."""
_EXAMPLES = """\
examples:
  held-out text, at three thresholds in two modes:
    exitserve eval MODEL --data heldout.txt --thresholds 0.5,0.7,0.9 --modes confidence,defer \\
      --out DIR
  the thresholds that `exitserve calibrate` found, and tasks of your own (lm-eval's YAML files):
    exitserve eval MODEL --data heldout.txt --thresholds auto --tasks my_task \\
      --task-path my-tasks --out DIR
  against a server that runs already:
    exitserve eval MODEL --data heldout.txt --tasks gsm8k --endpoint http://127.0.0.1:8000 \\
      --out DIR"""


def add_command(subparsers: Any) -> None:
    """Adds `eval` to the subparsers of the command line."""
    parser = subparsers.add_parser(
        "eval",
        help="measure quality against depth: perplexity, agreement, tasks",
        description=_HELP,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a checkpoint directory or hub id")
    add_revision(parser)
    add_adapter(parser)
    add_out_flags(parser)
    exits = parser.add_argument_group("what is compared with full depth")
    add_threshold_flags(exits, default=DEFAULT_THRESHOLDS)
    exits.add_argument(
        "--exit-checks", choices=EXIT_CHECKS, default="screened", help="as in `exitserve serve`"
    )
    _add_text(parser.add_argument_group("held-out text"))
    _add_tasks(parser.add_argument_group("tasks (lm-eval)"))
    parser.set_defaults(run=run)


def _add_text(text: Any) -> None:
    text.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help='text, blank lines between documents; or .jsonl with "text"',
    )
    text.add_argument(
        "--window", type=int, default=256, metavar="N", help="tokens of each (%(default)s)"
    )
    text.add_argument(
        "--prompt-tokens",
        type=int,
        default=32,
        metavar="N",
        help="how many of them are the prompt, at full depth (%(default)s)",
    )
    text.add_argument("--windows", type=int, default=64, metavar="N", help="at most (%(default)s)")
    text.add_argument("--seed", type=int, default=0, help="of the choice of windows (%(default)s)")


def _add_tasks(tasks: Any) -> None:
    tasks.add_argument("--tasks", metavar="NAME,NAME", help="generative tasks of lm-eval")
    tasks.add_argument("--task-path", type=Path, metavar="DIR", help="task files of your own")
    tasks.add_argument("--limit", type=int, metavar="N", help="most requests of each task")
    tasks.add_argument(
        "--concurrency", type=int, default=4, metavar="N", help="requests at a time (%(default)s)"
    )
    tasks.add_argument(
        "--chat", action="store_true", help="put prompts into the tokenizer's chat template"
    )
    tasks.add_argument(
        "--endpoint", metavar="URL", help="a running exitserve server (default: start one)"
    )
    tasks.add_argument(
        "--dtype", default="auto", metavar="TYPE", help="of the server that is started"
    )
    tasks.add_argument("--enforce-eager", action="store_true", help="the server does not compile")
    tasks.add_argument("--max-model-len", type=int, metavar="N", help="its context, in tokens")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code.

    Raises:
        ExitServeError: an argument is wrong, or the server or a task fails.
    """
    job = job_of(args)
    from exitserve.evaluation.run import check_server
    from exitserve.report import prepare_out_dir
    from exitserve.windows import load_tokenizer, windows_of

    check_server(job)
    tasks = _tasks(job)
    tokenizer = load_tokenizer(job.directory)
    windows = windows_of(job.documents, tokenizer, job.window, job.windows, job.seed)
    out = prepare_out_dir(args.out, overwrite=args.overwrite)
    data = _evaluate(job, windows, tasks, out)
    _publish(out, data)
    return 0


def job_of(args: argparse.Namespace) -> EvalJob:
    """The job that the arguments ask for.

    Raises:
        ExitServeError: an argument is wrong.
    """
    from exitserve.hub import local_checkpoint
    from exitserve.windows import read_documents

    args = with_adapter(args)
    served_architecture(args.model, args.revision)
    modes = modes_of(args.modes)
    options: dict[str, Any] = {"exit_checks": args.exit_checks}
    options |= verify_options() if "verify" in modes else {}
    rules = check_rules(args.model, options, args.revision)
    settings = make_settings(rules, thresholds_of(args.thresholds), modes)
    prompt_tokens = at_least(1, args.prompt_tokens, "--prompt-tokens")
    # At least one token is decoded, and one more is there to be predicted.
    window = at_least(prompt_tokens + 2, args.window, "--window")
    check_context(window, read_config(args.model, args.revision), "--window")
    return EvalJob(
        model=args.model_name,
        directory=local_checkpoint(args.model, args.revision),
        rules=rules,
        exit_checks=args.exit_checks,
        settings=settings,
        documents=read_documents(args.data),
        window=window,
        prompt_tokens=prompt_tokens,
        windows=at_least(1, args.windows, "--windows"),
        seed=args.seed,
        tasks=_task_job(args),
    )


def _task_job(args: argparse.Namespace) -> TaskJob | None:
    names = tuple(words(args.tasks or ""))
    if not names:
        for flag in ("task_path", "endpoint", "limit"):
            if getattr(args, flag) is not None:
                raise ExitServeError(f"--{flag.replace('_', '-')} goes with --tasks; name some.")
        return None
    if find_spec("lm_eval") is None:
        raise ExitServeError(
            "--tasks needs lm-eval, which is not installed: pip install 'exitserve[eval]'."
        )
    options = ["--dtype", check_dtype(args.dtype)]
    options += ["--enforce-eager"] if args.enforce_eager else []
    if args.max_model_len is not None:
        options += ["--max-model-len", str(at_least(2, args.max_model_len, "--max-model-len"))]
    return TaskJob(
        names=names,
        path=args.task_path,
        limit=None if args.limit is None else at_least(1, args.limit, "--limit"),
        concurrency=at_least(1, args.concurrency, "--concurrency"),
        chat=args.chat,
        endpoint=args.endpoint,
        server_options=tuple(options),
    )


def _tasks(job: EvalJob) -> Mapping[str, Any]:
    """lm-eval's tasks by name; what it and `datasets` print while loading is dropped."""
    if job.tasks is None:
        return {}
    from exitserve.engine_logs import redirect_stderr
    from exitserve.evaluation.harness import load_tasks

    with tempfile.NamedTemporaryFile(prefix="exitserve-") as log, redirect_stderr(Path(log.name)):
        return load_tasks(job.tasks)


def _evaluate(job: EvalJob, windows: Any, tasks: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Runs the evaluation; what libraries write to the error stream goes to a log."""
    from exitserve.engine_logs import redirect_stderr, visible_stderr
    from exitserve.evaluation.run import evaluate
    from exitserve.progress import share_bar

    with (
        visible_stderr() as screen,
        redirect_stderr(out / "eval.log"),
        share_bar(screen) as progress,
    ):
        return evaluate(job, windows, tasks, out, progress)


def _publish(out: Path, data: dict[str, Any]) -> None:
    from exitserve.evaluation import page
    from exitserve.report import publish, terminal_table

    shown = []
    if data["cases"][0]["tasks"]:
        rows = page.task_rows(data["cases"])
        shown.append(terminal_table("tasks", page.SHORT_TASK_HEADERS, rows))
    rows = page.text_rows(data["cases"])
    shown.append(terminal_table(page.title_of(data), page.SHORT_HEADERS, rows))
    if data["drafting"]:
        headers, rows = page.drafting_headers(data), page.drafting_rows(data)
        shown.append(terminal_table(page.DRAFTING_TITLE, headers, rows))
    least = page.minimum_line(data)
    lines = [least] if least else []
    lines += [f"Warning: {note}" for note in (page.warning_of(data), *data["notes"])]
    publish(out, data, page.markdown(data), {"retention": page.plot(data)}, [*shown, *lines])
