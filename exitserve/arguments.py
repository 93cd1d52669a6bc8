"""Arguments that several commands share: their flags, how they are read, what they mean."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from exitserve.checkpoint.block import BLOCK, context_length_of, parse_multi_exit, read_config
from exitserve.checkpoint.calibration import FREQUENT
from exitserve.checkpoint.hub import BLOCK_FILE
from exitserve.errors import ExitServeError
from exitserve.policy import (
    AUTO,
    BY_CONFIDENCE,
    MODES,
    ExitPolicy,
    ExitRules,
    Mode,
    check_threshold,
)

Number = TypeVar("Number", int, float)

DEFAULT_THRESHOLDS = "0.5,0.7,0.9"
ENGINE_DTYPES = ("auto", "float32", "bfloat16")
"""What commands that start engines take as --dtype; "auto" is the checkpoint's own."""


def add_out_flags(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds `--out` and `--overwrite`, for `exitserve.reporting.report.prepare_out_dir`."""
    help_text = "where the report goes" if required else "also write a report there"
    parser.add_argument("--out", required=required, metavar="DIR", help=help_text)
    parser.add_argument("--overwrite", action="store_true", help="replace a report in DIR")


def add_model_command(
    subparsers: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    model: str = "checkpoint directory or hub id",
    adapter: bool = True,
    **texts: Any,
) -> argparse.ArgumentParser:
    """Adds a command that takes MODEL, `--revision`, and `--adapter` for `with_adapter`."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, formatter_class=formatter, **texts
    )
    parser.add_argument("model", metavar="MODEL", help=model)
    parser.add_argument(
        "--revision",
        metavar="R",
        help="branch, tag or commit of a MODEL that is a hub id (default: its default branch)",
    )
    if adapter:
        add_adapter(parser)
    parser.set_defaults(run=run)
    return parser


def exit_layers_of(text: str) -> list[int]:
    """Reads `4,8`, as argparse's `type`."""
    try:
        return [int(part) for part in words(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of layers; write for example 4,8"
        ) from error


def add_adapter(parser: argparse.ArgumentParser) -> None:
    """Adds `--adapter`, for `with_adapter`."""
    parser.add_argument(
        "--adapter",
        metavar="DIR",
        help="LoRA adapter of MODEL, a directory or hub id: its weights are merged into MODEL's, "
        "and exits and thresholds are the adapter's",
    )


def with_adapter(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with the merged checkpoint as `model`, where `--adapter` was given.

    In any case `model_name` is what reports call it.

    Raises:
        ExitServeError: the adapter cannot be merged, see `merged_checkpoint`.
    """
    if args.adapter is None:
        return argparse.Namespace(**vars(args), model_name=str(args.model))
    from exitserve.checkpoint.adapters import merged_checkpoint

    revision = getattr(args, "revision", None)
    merged = merged_checkpoint(str(args.model), args.adapter, revision)
    if BLOCK not in read_config(merged) and not getattr(args, "exit_layers", None):
        print(
            f"exitserve: '{args.adapter}' names no exits (it has no {BLOCK_FILE}), so tokens take "
            f"all layers; serve, bench and calibrate can be given --exit-layers.",
            file=sys.stderr,
        )
    changed = {"model": str(merged), "revision": None, "model_name": merged.name}
    return argparse.Namespace(**{**vars(args), **changed})


def add_threshold_flags(group: argparse._ArgumentGroup, *, default: str | None) -> None:
    """Adds `--thresholds` and `--modes`, for `thresholds_of` and `modes_of`."""
    group.add_argument(
        "--thresholds",
        metavar="T,T",
        default=default,
        help="exit thresholds to measure; auto: the calibrated ones; auto:0.95: those calibrated "
        f"to keep this agreement (default {default or 'auto, or 0.7 without any'})",
    )
    group.add_argument(
        "--modes",
        metavar="M,M",
        default="",
        help="modes in which to measure each threshold: confidence, defer, verify (default: "
        "confidence, and for auto the mode in which a server would have it)",
    )


def numbers(text: str, kind: Callable[[str], Number], flag: str) -> list[Number]:
    """Reads `1,8` or `0.5,0.7`; an empty text is an empty list.

    Raises:
        ExitServeError: a part is not a number.
    """
    try:
        return [kind(part) for part in words(text)]
    except ValueError as error:
        raise ExitServeError(
            f"{flag} {text!r} must be numbers separated by commas, without spaces."
        ) from error


def threshold_or_auto(text: str) -> float | str:
    """Reads `0.8` or `auto`, as argparse's `type`."""
    try:
        return text if text == AUTO else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number, for example 0.8, nor {AUTO}"
        ) from error


def words(text: str) -> list[str]:
    """The parts of a text between commas, without those that are blank."""
    return [part.strip() for part in text.split(",") if part.strip()]


def thresholds_of(text: str) -> list[float | str]:
    """Reads `0.5,auto,auto:0.95`; words stay words, for `exitserve.settings.exit_fields`.

    Raises:
        ExitServeError: a part is neither a number above 0 nor such a word.
    """
    found: list[float | str] = []
    for part in words(text):
        word, colon, target = part.partition(":")
        if word != AUTO:
            (number,) = numbers(part, float, "--thresholds")
            found.append(check_threshold(number, "--thresholds"))
        elif colon:
            (number,) = numbers(target, float, f"--thresholds {AUTO}:") or [0.0]
            found.append(f"{AUTO}:{number:g}")
        else:
            found.append(AUTO)
    return found


def modes_of(text: str) -> list[Mode]:
    """Reads `confidence,defer`.

    Raises:
        ExitServeError: a part is not a mode with thresholds.
    """
    known: dict[str, Mode] = {mode: mode for mode in BY_CONFIDENCE}
    parts = words(text)
    for part in parts:
        if part not in known:
            raise ExitServeError(f"--modes {part!r} is unknown; allowed: {', '.join(known)}.")
    return [known[part] for part in parts]


def batch_sizes_of(text: str) -> list[int]:
    """Reads `1,8` as batch sizes.

    Raises:
        ExitServeError: there are none, one is below 1, or one is given twice.
    """
    sizes = [at_least(1, size, "--batch-sizes") for size in numbers(text, int, "--batch-sizes")]
    if not sizes or len(set(sizes)) != len(sizes):
        raise ExitServeError(f"--batch-sizes {text!r} must name sizes, each once.")
    return sizes


def drafting_options(num_drafts: int | None = None) -> dict[str, Any]:
    """Exit options of an engine that drafts; every request names its own mode and threshold."""
    options: dict[str, Any] = {"mode": "verify", "exit_threshold": 0.5}
    return options if num_drafts is None else options | {"num_drafts": num_drafts}


def any_mode(rules: ExitRules) -> ExitRules:
    """Rules by which settings of every mode can be compared, each on a server of its own."""
    return replace(rules, default=ExitPolicy.off(), modes=MODES)


def calibrated_rows(config: Mapping[str, Any]) -> str:
    """The one of `EXIT_ROWS` with which a checkpoint was calibrated; by default "frequent", as in
    servers."""
    block = parse_multi_exit(config)
    return FREQUENT if block is None or not block.calibration else block.calibration.exit_rows


def show_verdict(config: Mapping[str, Any]) -> None:
    """Says on one line what training found of a checkpoint's exits, if that is known."""
    block = parse_multi_exit(config)
    if block is not None and block.verdict is not None:
        print(f"exitserve: {block.verdict}", file=sys.stderr)


def check_context(tokens: int, config: Mapping[str, Any], flag: str) -> int:
    """Returns `tokens`; raises `ExitServeError` if the model's context is shorter."""
    longest = context_length_of(config)
    if longest is not None and tokens > longest:
        raise ExitServeError(
            f"{flag} {tokens} is longer than the model's context of {longest} tokens."
        )
    return tokens


def at_least(least: Number, value: Number, flag: str) -> Number:
    """Returns `value`; raises `ExitServeError` if it is below `least`."""
    if not value >= least:  # also if it is no number
        raise ExitServeError(f"{flag} must be at least {least}, not {value}.")
    return value
