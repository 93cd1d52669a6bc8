"""The command: from arguments to a calibration, its report, and the checkpoint's new block."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exitserve.arguments import (
    add_model_command,
    at_least,
    check_context,
    numbers,
    show_verdict,
    with_adapter,
    words,
)
from exitserve.checkpoint.block import (
    MultiExit,
    block_file,
    check_exit_layers,
    num_layers_of,
    parse_multi_exit,
    read_config,
)
from exitserve.checkpoint.calibration import (
    CALIBRATED_MODES,
    EXIT_ROWS,
    FREQUENT,
    ROWS_FOLDER,
    Calibration,
)
from exitserve.checkpoint.files import check_writable, is_writable, link_files
from exitserve.checkpoint.hub import BLOCK_FILE, is_adapter, local_adapter, local_checkpoint
from exitserve.errors import ExitServeError
from exitserve.policy import BY_CONFIDENCE, Mode

if TYPE_CHECKING:
    from exitserve.calibration.run import CalibrationResult

DEFAULT_AGREEMENT = 0.99


RESEARCH: dict[str, Any] = {
    "confidence_level": 0.95,  # of the guarantee
    "prompt_tokens": 32,  # of each window
    "generated_share": 0.5,  # of the windows, whose prompts the model continues
}
"""Options without a flag, for `exitserve.cli.main`."""
_ELSEWHERE = "--out DIR writes a checkpoint of links to its files, with the thresholds, into DIR"

_HELP = """\
Chooses exit layers and a threshold for each, so that tokens cost as little as possible while a
target is kept: by default, that 99 % of the tokens are those of full depth. In mode defer it is one
layer, the one that drafts. The choice is made on one part of the text and tested on another, with a
finite-sample guarantee: with 95 % confidence, the target holds on text of the same kind. Thresholds
go into the checkpoint's config.json, where `exitserve serve` finds them; a report with plots goes
into --out.

FILE is held-out text (or .jsonl with a "text" on each line), of the kind that will be served.
Half of the windows serve as prompts only: the model continues them, and the promise is tested on
its own text too."""
_EXAMPLES = """\
examples:
  exitserve calibrate MODEL --data held-out.txt --target-agreement 0.99
  exitserve calibrate MODEL --data held-out.jsonl --mode defer --target-agreement 0.98
  exitserve calibrate MODEL --data held-out.jsonl --mode defer,confidence   # one for each
  exitserve calibrate MODEL --data held-out.jsonl --temperature 0   # greedy answers
then
  exitserve serve MODEL                              # the calibrated thresholds are its default
  {"vllm_xargs": {"exit_target": 0.95}}              # in a request: another target

The test needs much text: for an agreement of 0.99 at a confidence of 0.95 at least 321 windows if
no token is ever wrong, about three times as many in practice, and the same number of continuations
by the model. With less, the strictest agreement that the text supports is promised instead, and
the report says so. Each row of a .jsonl gives one window. A text file is cut into many, and the
promise then holds for that text."""


def add_calibrate(subparsers: Any) -> None:
    """Adds the `calibrate` command."""
    parser = add_model_command(
        subparsers,
        "calibrate",
        run,
        model="a checkpoint with exits: directory or hub id",
        help="choose thresholds that keep a target, with a guarantee",
        description=_HELP,
        epilog=_EXAMPLES,
    )
    parser.add_argument("--data", required=True, metavar="FILE", help="held-out text or .jsonl")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="where the report goes (default: MODEL/calibration); where MODEL cannot be written "
        "to, or is a hub id, a checkpoint that links to its files and has the thresholds",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="write the report only, not into config.json"
    )
    parser.add_argument(
        "--target-agreement",
        type=float,
        default=DEFAULT_AGREEMENT,
        metavar="A",
        help="least share of tokens that must be full depth's (default %(default)s)",
    )
    parser.add_argument(
        "--mode",
        metavar="M,M",
        default=CALIBRATED_MODES[0],
        help=f"mode in which the thresholds will be served, {' or '.join(CALIBRATED_MODES)}, or "
        "both; the first is the server's by itself (default %(default)s)",
    )
    parser.add_argument(
        "--exit-rows",
        choices=EXIT_ROWS,
        default=FREQUENT,
        help="rows of the LM head that checks read, as the server will have it: those of frequent "
        "tokens, where the vocabulary is large, or all (default %(default)s)",
    )
    parser.add_argument(
        "--exit-layers",
        metavar="N,N",
        help="replace the checkpoint's exit layers, in its config.json too",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        metavar="TYPE",
        help="auto|float32|bfloat16|float16, as the server will have it: promises are about tokens "
        "that are rounded so (default %(default)s)",
    )
    _add_text(parser)
    parser.set_defaults(**RESEARCH)


def _add_text(parser: argparse.ArgumentParser) -> None:
    """Adds how the text is cut and continued."""
    text = parser.add_argument_group("text")
    text.add_argument(
        "--windows", type=int, default=2400, metavar="N", help="at most (default %(default)s)"
    )
    text.add_argument(
        "--window", type=int, default=256, metavar="T", help="tokens of each (default %(default)s)"
    )
    text.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="at which the model continues the beginnings of half of them, as it will be served; "
        "0: greedy (default %(default)g)",
    )


def _check_text(args: argparse.Namespace) -> None:
    """Raises `ExitServeError` unless the text options make sense."""
    at_least(10, args.windows, "--windows")
    at_least(1, args.prompt_tokens, "prompt_tokens")
    at_least(args.prompt_tokens + 8, args.window, "--window")
    if not 0.0 <= args.generated_share <= 1.0:
        raise ExitServeError(f"generated_share must be from 0 to 1, not {args.generated_share:g}.")
    if not 0.0 <= args.temperature <= 2.0:
        raise ExitServeError(f"--temperature must be from 0 to 2, not {args.temperature:g}.")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code.

    Raises:
        ExitServeError: an argument is wrong, or the text is too little.
    """
    args.modes = _modes(args)
    from exitserve.calibration.calibrate import calibrate, targets_of
    from exitserve.calibration.unfinished import UnfinishedWork
    from exitserve.reporting.progress import step_bars

    base, args = args.model, with_adapter(args)
    block, config = _block(args)
    show_verdict(config)
    targets = targets_of(args)
    _check_text(args)
    directory = local_checkpoint(args.model, args.revision)
    home = directory if args.adapter is None else local_adapter(args.adapter)
    target, out = _places(args, home)
    work = UnfinishedWork(out, _all_that_decides(args, directory))
    if len(work):
        print(f"Going on with what an interrupted run left in {work.path}.")
    try:
        with step_bars() as progress:
            calibration, reports, found = calibrate(
                args, directory, block, config, targets, progress, work.recall
            )
    except KeyboardInterrupt:
        print(
            f"Interrupted. What was found is kept in {work.path}: the same command goes on there.",
            file=sys.stderr,
        )
        raise
    from exitserve.calibration.page import show_report
    from exitserve.reporting.report import prepare_out_dir

    kept = any(point.thresholds for point in calibration.by_name().values())
    try:
        for name, data in reports.items():  # first: they hold all that was found
            show_report(prepare_out_dir(out / name, overwrite=True), data)
        if kept and target is not None:
            _write(home, target, block, calibration, found)
    except OSError as error:
        raise ExitServeError(f"cannot write what was found: {error}.") from error
    work.finish()
    if kept and target is not None:
        served = target if args.adapter is None else f"{base} --adapter {target}"
        print(f"Written into {block_file(target)}; `exitserve serve {served}` uses it.")
    return 0


def _all_that_decides(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """What the results of a calibration depend on; files by size and time."""
    from exitserve.reporting.report import versions

    files = [Path(args.data), *sorted(directory.glob("*.safetensors")), directory / "config.json"]
    states = [
        (str(one), one.stat().st_size, one.stat().st_mtime_ns) for one in files if one.exists()
    ]
    options = {name: value for name, value in vars(args).items() if name not in ("run", "out")}
    return {"options": options, "files": states, "versions": versions()}


def _places(args: argparse.Namespace, directory: Path) -> tuple[Path | None, Path]:
    """The checkpoint that gets the thresholds, None in a dry run; and the folder of the report.

    Raises:
        ExitServeError: one of them cannot be written to, which should not be found out at the end.
    """
    from exitserve.calibration.unfinished import FILE
    from exitserve.reporting.report import prepare_out_dir

    folders = [one for one in (directory, directory / ROWS_FOLDER) if one.is_dir()]
    if args.out is None:
        for folder in folders:
            check_writable(folder, _ELSEWHERE)
        return directory, prepare_out_dir(directory / "calibration", overwrite=True)
    goes_on = any(
        (folder / FILE).exists() for folder in (Path(args.out), Path(args.out, "calibration"))
    )
    out = prepare_out_dir(args.out, overwrite=goes_on)
    check_writable(out, "give another --out")
    if args.dry_run:
        return None, out
    if _is_hub_id(args) or not all(map(is_writable, folders)):
        return out, prepare_out_dir(out / "calibration", overwrite=goes_on)
    return directory, out


def _is_hub_id(args: argparse.Namespace) -> bool:
    """Whether thresholds would be written to a hub."""
    return not Path(args.adapter or args.model).is_dir()


def _block(args: argparse.Namespace) -> tuple[MultiExit, dict[str, Any]]:
    config = read_config(args.model, args.revision)
    if args.dry_run and args.out is None:
        raise ExitServeError("--dry-run writes nothing but a report: say where with --out DIR.")
    if args.out is None and _is_hub_id(args):
        raise ExitServeError(
            f"'{args.adapter or args.model}' is a hub id, and thresholds cannot be written there; "
            f"{_ELSEWHERE}."
        )
    check_context(args.window, config, "--window")
    block = parse_multi_exit(config)
    num_layers = num_layers_of(config)
    if args.exit_layers:
        layers = check_exit_layers(numbers(args.exit_layers, int, "--exit-layers"), num_layers)
        block = MultiExit(exit_layers=layers, objective=block.objective if block else "unknown")
    if block is None or not block.exit_layers:
        raise ExitServeError(
            f"'{args.model_name}' declares no exits, so there is nothing to calibrate: "
            f"`exitserve plan` tells which exits could pay, and `exitserve train` trains them. "
            f"Layers that were trained elsewhere can be named with --exit-layers N,N."
        )
    check_exit_layers(block.exit_layers, num_layers)
    return block, config


def _modes(args: argparse.Namespace) -> list[Mode]:
    """The modes to calibrate, that of the server by itself first."""
    modes = words(args.mode)
    if not modes or len(set(modes)) < len(modes) or not set(modes) <= set(CALIBRATED_MODES):
        raise ExitServeError(
            f"--mode must be {' or '.join(CALIBRATED_MODES)}, or both with a comma between them, "
            f"not {args.mode!r}."
        )
    return [mode for name in modes for mode in BY_CONFIDENCE if mode == name]


def _write(
    directory: Path,
    target: Path,
    block: MultiExit,
    calibration: Calibration,
    found: CalibrationResult,
) -> None:
    """Puts the record into the checkpoint, or into one that links to the checkpoint's files.

    Its config.json comes last: until then nothing reads what is new.
    """
    from dataclasses import replace

    from exitserve.checkpoint.block import write_multi_exit
    from exitserve.checkpoint.exit_rows import save_exit_rows

    if target != directory:
        own = ("config.json", BLOCK_FILE, "calibration", ROWS_FOLDER)
        link_files(directory, target, but=own)
    rows = None if found.exit_rows is None else save_exit_rows(target, found.exit_rows)
    block = replace(block, criterion=found.criterion, rows=rows, calibration=calibration)
    write_multi_exit(target, block, None if is_adapter(directory) else read_config(directory))
