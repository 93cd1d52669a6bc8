"""The command: from arguments to a job, the comparison and a report.

Light to import: torch and vLLM are loaded only once the arguments are known to be good.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from exitserve.arguments import (
    ENGINE_DTYPES,
    add_model_command,
    add_out_flags,
    add_threshold_flags,
    any_mode,
    at_least,
    batch_sizes_of,
    calibrated_rows,
    drafting_options,
    modes_of,
    numbers,
    show_verdict,
    thresholds_of,
    with_adapter,
)
from exitserve.bench.prompts import encode_prompts, first_prompts, load_prompts
from exitserve.bench.rivals import KINDS, check_rivals
from exitserve.bench.settings import GPU_SHARE, BenchJob, draft_layers
from exitserve.checkpoint.block import read_config
from exitserve.checkpoint.hub import local_checkpoint
from exitserve.engine.launch import DIED, check_rules, served_architecture
from exitserve.errors import ExitServeError, one_line
from exitserve.policy import AUTO, ExitRules
from exitserve.settings import PLAIN, Setting, make_settings

UNCALIBRATED = "0.7"
"""The threshold of a checkpoint that was not calibrated, unless --thresholds names others."""
MIN_TOKENS = 2
"""The first token of a request is not timed."""

_HELP = """\
Runs the same requests through plain vLLM and through exitserve at every setting, interleaved
and repeated, and writes report.json, report.md and a plot."""
_EXAMPLES = """\
examples:
  a checkpoint, at three confidence thresholds, beside vLLM's own drafts too:
    exitserve bench MODEL --thresholds 0.5,0.7,0.9 --rivals ngram --out DIR
  the thresholds that `exitserve calibrate` found, several tokens a step among them:
    exitserve bench MODEL --thresholds auto --modes defer,verify --out DIR

A batch reads a layer's weights if any of its requests needs the layer. The column `limit` says
what exits can give at most; read a wall speedup beside it."""


def add_command(subparsers: Any) -> None:
    """Adds `bench` to the subparsers of the command line."""
    parser = add_model_command(
        subparsers,
        "bench",
        run,
        help="compare early exit with plain vLLM, side by side",
        description=_HELP,
        epilog=_EXAMPLES,
    )
    add_out_flags(parser)
    _add_settings(parser)
    _add_work(parser)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    exits = parser.add_argument_group("what is compared")
    add_threshold_flags(exits, default=None)
    exits.add_argument(
        "--num-drafts",
        type=int,
        metavar="N",
        help="most tokens drafted at a time, as on a server with this option",
    )
    exits.add_argument(
        "--rivals",
        default="",
        metavar="WHAT,WHAT",
        help=f"also measure plain vLLM with drafts of its own: {', '.join(KINDS)}",
    )
    exits.add_argument("--exit-layers", metavar="N,N", help="replace the checkpoint's exit layers")
    exits.add_argument(
        "--batch-sizes",
        default="1,8",
        metavar="B,B",
        help="requests decoding together (default %(default)s)",
    )


def _add_work(parser: argparse.ArgumentParser) -> None:
    work = parser.add_argument_group("requests")
    work.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="one on each line of a text file or .jsonl (default: bundled)",
    )
    work.add_argument(
        "--requests", type=int, default=2, metavar="N", help="in each pass (default %(default)s)"
    )
    work.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="of each (default %(default)s)"
    )
    work.add_argument(
        "--repeats", type=int, default=2, metavar="N", help="timed passes (default %(default)s)"
    )
    work.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        metavar="S",
        help="of decoding in each timed pass, at least: shorter ones send their requests again "
        "(default %(default)g)",
    )
    engine = parser.add_argument_group("all engines")
    engine.add_argument("--dtype", default="auto", choices=ENGINE_DTYPES)
    engine.add_argument("--enforce-eager", action="store_true", help="do not compile")
    engine.add_argument("--max-model-len", type=int, metavar="N", help="context, in tokens")
    engine.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=GPU_SHARE,
        metavar="P",
        help="share of a GPU's memory, which all engines together divide (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code.

    Raises:
        ExitServeError: see `job_of` and `run_job`.
    """
    run_job(job_of(args), args.out, overwrite=args.overwrite)
    return 0


def job_of(args: argparse.Namespace) -> BenchJob:
    """The job that the arguments ask for.

    Raises:
        ExitServeError: an argument is wrong.
    """
    args = with_adapter(args)
    served_architecture(args.model, args.revision)
    model_dir = local_checkpoint(args.model, args.revision)
    modes = modes_of(args.modes)
    config = read_config(model_dir)
    show_verdict(config)
    exit_rows = calibrated_rows(config)
    options: dict[str, Any] = {"exit_rows": exit_rows, "mode": "off"}
    if args.exit_layers:
        options["exit_layers"] = numbers(args.exit_layers, int, "--exit-layers")
    rules = any_mode(check_rules(model_dir, options))
    if args.num_drafts is not None:
        check_rules(model_dir, options | drafting_options(args.num_drafts))
    thresholds = thresholds_of(args.thresholds or _default_thresholds(rules))
    batch_sizes = batch_sizes_of(args.batch_sizes)
    rivals = check_rivals(args.rivals, model_dir)
    others = [Setting(mode="rival", rival=name) for name in rivals]
    settings = (PLAIN, *make_settings(rules, thresholds, modes), *others)
    draft_layers(rules, settings)
    count = max(at_least(1, args.requests, "--requests"), *batch_sizes)
    prompts = first_prompts(encode_prompts(load_prompts(args.prompts), model_dir), count)
    return BenchJob(
        model_dir=model_dir,
        model_name=args.model_name,
        rules=rules,
        settings=settings,
        batch_sizes=tuple(batch_sizes),
        prompts=prompts,
        requests=args.requests,
        prompt_source="bundled prompts" if args.prompts is None else args.prompts.name,
        max_tokens=at_least(MIN_TOKENS, args.max_tokens, "--max-tokens"),
        repeats=at_least(1, args.repeats, "--repeats"),
        seconds=at_least(0.0, args.seconds, "--seconds"),
        dtype=args.dtype,
        enforce_eager=args.enforce_eager,
        max_model_len=None
        if args.max_model_len is None
        else at_least(MIN_TOKENS, args.max_model_len, "--max-model-len"),
        gpu_memory_utilization=_gpu_share(args.gpu_memory_utilization),
        exit_rows=exit_rows,
        num_drafts=args.num_drafts,
        rivals=rivals,
    )


def run_job(job: BenchJob, out: str | Path, *, overwrite: bool) -> dict[str, Any]:
    """Compares, writes and prints a report; returns it.

    Raises:
        ExitServeError: the folder is not empty; an engine failed; or a prompt is longer than the
            model's context, which is found after the engines were started.
    """
    from exitserve.reporting.report import prepare_out_dir

    folder = prepare_out_dir(out, overwrite=overwrite)
    try:
        data = _compare(job, folder / "engines.log")
    except RuntimeError as error:
        if not any(words in str(error) for words in DIED):
            raise
        raise ExitServeError(f"{one_line(str(error))} The log above says how.") from error
    _publish(folder, data)
    return data


def _gpu_share(given: float) -> float:
    if not 0 < given <= 1:
        raise ExitServeError(
            f"--gpu-memory-utilization must be above 0 and at most 1, not {given:g}."
        )
    return given


def _default_thresholds(rules: ExitRules) -> str:
    """The calibrated ones, if any of them exits."""
    promises = rules.calibrated is not None and rules.calibrated.chosen.thresholds
    return AUTO if promises else UNCALIBRATED


def _compare(job: BenchJob, log: Path) -> dict[str, Any]:
    """Runs the comparison; what the engines write to the error stream goes to `log`."""
    from exitserve.bench import engines
    from exitserve.bench.run import compare
    from exitserve.reporting.engine_logs import redirect_stderr, visible_stderr
    from exitserve.reporting.progress import share_bar

    with visible_stderr() as screen, redirect_stderr(log):
        engines.prepare(job)
        with share_bar(screen) as progress:
            return compare(job, progress)


def _publish(out: Path, data: dict[str, Any]) -> None:
    from exitserve.bench import page
    from exitserve.reporting.report import publish, terminal_table

    shown = [
        terminal_table(page.title_of(data), *page.short_table(data["cases"])),
        *([page.SYNTHETIC] if data["synthetic"] else []),
        *(f"Warning: {note}" for note in data["notes"]),
    ]
    publish(out, data, page.markdown(data), {"wall_speedup": page.plot(data)}, shown)
