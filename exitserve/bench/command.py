"""The command: from arguments to a job, the comparison and a report.

Light to import: torch and vLLM are loaded only once the arguments are known to be good.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from exitserve import synthetic_shapes
from exitserve.arguments import (
    ENGINE_DTYPES,
    add_adapter,
    add_out_flags,
    add_revision,
    add_threshold_flags,
    at_least,
    batch_sizes_of,
    check_dtype,
    check_model_or_synthetic,
    modes_of,
    numbers,
    thresholds_of,
    verify_options,
    with_adapter,
)
from exitserve.bench.prompts import encode_prompts, first_prompts, load_prompts
from exitserve.bench.rivals import KINDS, check_rivals
from exitserve.bench.settings import GPU_SHARE, BenchJob, Setting, make_settings
from exitserve.calibration_record import EXIT_CHECKS, SCREENED
from exitserve.engine.launch import check_rules, served_architecture
from exitserve.errors import ExitServeError
from exitserve.hub import local_checkpoint
from exitserve.policy import AUTO, ExitRules

UNCALIBRATED = "0.7"
"""The threshold of a checkpoint that was not calibrated, unless --thresholds names others."""
MIN_TOKENS = 2
"""The first token of a request is not timed."""

_HELP = """\
Runs the same requests through plain vLLM and through exitserve at every setting, interleaved
and repeated, and writes report.json, report.md and a plot. Says first how long that takes."""
_EXAMPLES = """\
examples:
  a checkpoint, at three confidence thresholds, beside vLLM's own drafts too:
    exitserve bench MODEL --thresholds 0.5,0.7,0.9 --rivals ngram --out DIR
  the machinery alone, at a size where layers dominate; every token exits at layer 6, then at 12:
    exitserve bench --synthetic llama-350m --force-exit-layer 6 12 --out DIR
  a batch of which seven in ten requests exit at layer 6 and the others never, after long prompts:
    exitserve bench --synthetic llama-1.3b --batch-sizes 8 --prompt-tokens 4096 \\
      --mixed 0.7@6 --out DIR

A batch reads a layer's weights if any of its requests needs the layer. The column `limit` says
what exits can give at most; read a wall speedup beside it."""


def add_command(subparsers: Any) -> None:
    """Adds `bench` to the subparsers of the command line."""
    parser = subparsers.add_parser(
        "bench",
        help="compare early exit with plain vLLM, side by side",
        description=_HELP,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a checkpoint directory or hub id"
    )
    add_revision(parser)
    add_adapter(parser)
    add_out_flags(parser)
    _add_settings(parser)
    _add_work(parser)
    _add_shape(parser)
    parser.set_defaults(run=run)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    exits = parser.add_argument_group("what is compared")
    add_threshold_flags(exits, default=None)
    exits.add_argument(
        "--exit-checks",
        choices=EXIT_CHECKS,
        default=SCREENED,
        help="as in `exitserve serve` (default %(default)s)",
    )
    exits.add_argument(
        "--num-drafts",
        type=int,
        metavar="N",
        help="most tokens drafted at a time, as on a server with this option",
    )
    exits.add_argument(
        "--fixed-layers", metavar="N,N", help="also measure every token exiting at layer N"
    )
    exits.add_argument(
        "--mixed",
        action="append",
        metavar="SHARE@N",
        help="also measure a mix: 0.7@6 has seven in ten requests exit at layer 6 on every token, "
        "the others never; repeat it, or separate by commas, for more",
    )
    exits.add_argument(
        "--rivals",
        default="",
        metavar="WHAT,WHAT",
        help=f"also measure plain vLLM with drafts of its own: {', '.join(KINDS)} (a directory)",
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
    engine.add_argument("--dtype", default="auto", metavar="TYPE", help="|".join(ENGINE_DTYPES))
    engine.add_argument("--enforce-eager", action="store_true", help="do not compile")
    engine.add_argument("--max-model-len", type=int, metavar="N", help="context, in tokens")
    engine.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=GPU_SHARE,
        metavar="P",
        help="share of a GPU's memory, which all engines together divide (default %(default)s)",
    )


def _add_shape(parser: argparse.ArgumentParser) -> None:
    shape = parser.add_argument_group("instead of MODEL: a shape with random weights")
    shape.add_argument("--synthetic", metavar="NAME", help="|".join(synthetic_shapes.SHAPES))
    shape.add_argument(
        "--force-exit-layer",
        nargs="+",
        metavar="N",
        help="exit layers; each is measured with every token exiting there",
    )
    shape.add_argument(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help=f"length of its random prompts, default {synthetic_shapes.PROMPT_TOKENS}",
    )
    shape.add_argument(
        "--force-confidence",
        type=float,
        metavar="P",
        help="each check passes with this probability, instead of every token exiting at one layer",
    )
    shape.add_argument(
        "--force-acceptance",
        type=float,
        metavar="P",
        help="with --force-confidence: each draft is accepted with this probability (default 1)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code.

    Raises:
        ExitServeError: an argument is wrong. Only a prompt longer than the model's context is
            found after the engines were started.
    """
    from exitserve.report import prepare_out_dir

    with job_of(args) as job:
        out = prepare_out_dir(args.out, overwrite=args.overwrite)
        data = _compare(job, out / "engines.log")
    _publish(out, data)
    return 0


@contextmanager
def job_of(args: argparse.Namespace) -> Iterator[BenchJob]:
    """The job that the arguments ask for; a synthetic checkpoint is removed at the end.

    Raises:
        ExitServeError: an argument is wrong.
    """
    check_model_or_synthetic(args)
    if args.synthetic is None:
        if args.force_exit_layer:
            raise ExitServeError(
                "--force-exit-layer belongs to --synthetic; with a MODEL use --fixed-layers."
            )
        if args.force_confidence is not None or args.force_acceptance is not None:
            raise ExitServeError("--force-confidence and --force-acceptance need --synthetic.")
        if args.prompt_tokens is not None:
            raise ExitServeError(
                "--prompt-tokens belongs to --synthetic; with a MODEL write longer --prompts."
            )
        args = with_adapter(args)
        served_architecture(args.model, args.revision)
        yield _job(args, local_checkpoint(args.model, args.revision))
        return
    synthetic_shapes.check_name(args.synthetic)
    if args.force_acceptance is not None and args.force_confidence is None:
        raise ExitServeError("--force-acceptance goes with --force-confidence.")
    for name, flag in (("exit_layers", "--exit-layers"), ("fixed_layers", "--fixed-layers")):
        if getattr(args, name) is not None:
            raise ExitServeError(f"{flag} does not go with --synthetic; use --force-exit-layer.")
    if args.prompts is not None:
        raise ExitServeError("--prompts does not go with --synthetic: its prompts are random.")
    with tempfile.TemporaryDirectory(prefix="exitserve-") as directory:
        synthetic_shapes.write_checkpoint(args.synthetic, Path(directory))
        yield _job(args, Path(directory))


def _job(args: argparse.Namespace, model_dir: Path) -> BenchJob:
    is_synthetic = args.synthetic is not None
    served_architecture(model_dir)
    mixed = [mix_of(part) for text in args.mixed or [] for part in text.split(",")]
    layers: list[int] | None
    if is_synthetic:
        fixed = sorted(numbers(",".join(args.force_exit_layer or []), int, "--force-exit-layer"))
        layers = sorted({*fixed, *(layer for _, layer in mixed)})
        if args.force_confidence is not None:
            fixed = []
    else:
        fixed = numbers(args.fixed_layers or "", int, "--fixed-layers")
        layers = numbers(args.exit_layers, int, "--exit-layers") if args.exit_layers else None
    modes = modes_of(args.modes)
    options: dict[str, Any] = {"exit_checks": args.exit_checks}
    options |= {} if layers is None else {"exit_layers": layers}
    if "verify" in modes or (args.num_drafts is not None and not args.rivals):
        options |= verify_options(args.num_drafts)
    rules = check_rules(model_dir, options)
    default = _default_thresholds(rules, synthetic=is_synthetic)
    thresholds = thresholds_of(default if args.thresholds is None else args.thresholds)
    batch_sizes = batch_sizes_of(args.batch_sizes)
    rivals = check_rivals(args.rivals, model_dir)
    settings = make_settings(rules, thresholds, fixed, mixed, modes)
    settings += tuple(Setting(mode="rival", rival=name) for name in rivals)
    count = max(at_least(1, args.requests, "--requests"), *batch_sizes)
    prompts, source = _prompts(args, model_dir, count)
    return BenchJob(
        model_dir=model_dir,
        model_name=f"synthetic {args.synthetic}" if is_synthetic else args.model_name,
        synthetic=is_synthetic,
        rules=rules,
        settings=settings,
        batch_sizes=tuple(batch_sizes),
        prompts=prompts,
        requests=args.requests,
        prompt_source=source,
        max_tokens=at_least(MIN_TOKENS, args.max_tokens, "--max-tokens"),
        repeats=at_least(1, args.repeats, "--repeats"),
        seconds=at_least(0.0, args.seconds, "--seconds"),
        dtype=check_dtype(args.dtype),
        enforce_eager=args.enforce_eager,
        max_model_len=_context(args),
        gpu_memory_utilization=_gpu_share(args.gpu_memory_utilization),
        exit_checks=args.exit_checks,
        num_drafts=args.num_drafts,
        rivals=rivals,
        forced=_forced(args),
    )


def _forced(args: argparse.Namespace) -> dict[str, float] | None:
    """Probabilities that replace the outcomes of checks and of verification; None: none do."""
    if args.force_confidence is None:
        return None
    acceptance = 1.0 if args.force_acceptance is None else args.force_acceptance
    given = {"--force-confidence": args.force_confidence, "--force-acceptance": acceptance}
    for flag, share in given.items():
        if not 0 <= share <= 1:
            raise ExitServeError(f"{flag} must be from 0 to 1, not {share:g}.")
    return {"confidence": args.force_confidence, "acceptance": acceptance}


def _gpu_share(given: float) -> float:
    if not 0 < given <= 1:
        raise ExitServeError(
            f"--gpu-memory-utilization must be above 0 and at most 1, not {given:g}."
        )
    return given


def _default_thresholds(rules: ExitRules, *, synthetic: bool) -> str:
    """The calibrated ones, if any of them exits."""
    if synthetic:
        return str(synthetic_shapes.NEVER_PASSED)
    promises = rules.calibrated is not None and rules.calibrated.chosen.thresholds
    return AUTO if promises else UNCALIBRATED


def _context(args: argparse.Namespace) -> int | None:
    """The context to ask the engines for; None for the checkpoint's own."""
    if args.max_model_len is not None:
        context: int = at_least(MIN_TOKENS, args.max_model_len, "--max-model-len")
        return context
    if args.synthetic is None:
        return None
    return synthetic_shapes.context_for(args.synthetic, _prompt_tokens(args), args.max_tokens)


def _prompt_tokens(args: argparse.Namespace) -> int:
    given = synthetic_shapes.PROMPT_TOKENS if args.prompt_tokens is None else args.prompt_tokens
    return at_least(1, given, "--prompt-tokens")


def _prompts(
    args: argparse.Namespace, model_dir: Path, count: int
) -> tuple[tuple[tuple[int, ...], ...], str]:
    """Token ids of `count` prompts, and where they are from, in words."""
    if args.synthetic is not None:
        length = _prompt_tokens(args)
        vocab_size: int = synthetic_shapes.SHAPES[args.synthetic]["vocab_size"]
        ids = synthetic_shapes.random_prompts(vocab_size, count, length)
        return tuple(map(tuple, ids)), f"{length} random tokens each"
    source = "bundled prompts" if args.prompts is None else args.prompts.name
    return first_prompts(encode_prompts(load_prompts(args.prompts), model_dir), count), source


def mix_of(text: str) -> tuple[float, int]:
    """Reads `0.7@6`: a share of the requests, and the layer at which they exit.

    Raises:
        ExitServeError: it is not of that form, or the share not between 0 and 1.
    """
    share, _, layer = text.partition("@")
    try:
        mix = float(share), int(layer)
    except ValueError as error:
        raise ExitServeError(
            f"--mixed {text!r} must be SHARE@LAYER, for example 0.7@6 for seven in ten requests "
            f"exiting at layer 6."
        ) from error
    if not 0 < mix[0] < 1:
        raise ExitServeError(
            f"--mixed {text!r}: the share must be above 0 and below 1; for all requests use a "
            f"fixed layer, and exits off is always measured."
        )
    return mix


def _compare(job: BenchJob, log: Path) -> dict[str, Any]:
    """Runs the comparison; what the engines write to the error stream goes to `log`."""
    from exitserve.bench import engines, schedule
    from exitserve.bench.run import compare
    from exitserve.engine_logs import redirect_stderr, visible_stderr
    from exitserve.progress import share_bar

    with visible_stderr() as screen, redirect_stderr(log):
        engines.prepare(job)
        count, share = len(engines.engine_names(job)), engines.gpu_share(job)
        parts = schedule.estimate(job, count)
        print(schedule.announcement(job, parts, count, share), file=screen)
        with share_bar(screen) as progress:
            return compare(job, parts, progress)


def _publish(out: Path, data: dict[str, Any]) -> None:
    from exitserve.bench import page
    from exitserve.report import publish, terminal_table

    rows = page.short_rows(data["cases"])
    shown = [
        terminal_table(page.title_of(data), page.SHORT_HEADERS, rows),
        *([page.SYNTHETIC] if data["synthetic"] else []),
        *(f"Warning: {note}" for note in data["notes"]),
    ]
    publish(out, data, page.markdown(data), {"wall_speedup": page.plot(data)}, shown)
