"""Options of `exitserve calibrate`: what to keep, how surely, and on which text."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from exitserve.arguments import at_least
from exitserve.errors import ExitServeError

if TYPE_CHECKING:
    from exitserve.calibration.risks import Target

AGREEMENTS = (0.9, 0.95, 0.98, 0.99)
"""Also calibrated, for requests that send `exit_target`, where the text is enough."""
DEFAULT_AGREEMENT = 0.99


RESEARCH: dict[str, Any] = {
    "confidence_level": 0.95,  # of the guarantee
    "prompt_tokens": 32,  # of each window
    "generated_share": 0.5,  # of the windows, whose prompts the model continues
    "costs": "bytes",  # or "measured" on this machine, or the figures of a device such as "h200"
}
"""Options without a flag, for `exitserve.cli.main`."""


def add_text(parser: argparse.ArgumentParser) -> None:
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


def targets_of(args: argparse.Namespace) -> list[Target]:
    """The target that was asked for, then those of `AGREEMENTS`."""
    from exitserve.calibration.risks import agreement_target

    if not 0.5 <= args.confidence_level < 1.0:
        raise ExitServeError(
            f"confidence_level must be from 0.5 to below 1, such as 0.95, not "
            f"{args.confidence_level:g}."
        )
    others = [agreement_target(one) for one in AGREEMENTS]
    asked = agreement_target(args.target_agreement)
    return [asked, *(one for one in others if one.agreement != asked.agreement)]


def check_text(args: argparse.Namespace) -> None:
    """Raises `ExitServeError` unless the options of `add_text` make sense."""
    at_least(10, args.windows, "--windows")
    at_least(1, args.prompt_tokens, "prompt_tokens")
    at_least(args.prompt_tokens + 8, args.window, "--window")
    if not 0.0 <= args.generated_share <= 1.0:
        raise ExitServeError(f"generated_share must be from 0 to 1, not {args.generated_share:g}.")
    if not 0.0 <= args.temperature <= 2.0:
        raise ExitServeError(f"--temperature must be from 0 to 2, not {args.temperature:g}.")
