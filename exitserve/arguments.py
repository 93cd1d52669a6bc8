"""What several commands read from their arguments: lists, bounds, thresholds, modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from exitserve.errors import ExitServeError
from exitserve.policy import AUTO, BY_CONFIDENCE, Mode, check_threshold

Number = TypeVar("Number", int, float)


def numbers(text: str, kind: Callable[[str], Number], flag: str) -> list[Number]:
    """Reads `1,8` or `0.5,0.7`; an empty text is an empty list.

    Raises:
        ExitServeError: a part is no number.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        return [kind(part) for part in parts]
    except ValueError as error:
        raise ExitServeError(
            f"{flag} {text!r} must be numbers separated by commas, without spaces."
        ) from error


def thresholds_of(text: str) -> list[float | str]:
    """Reads `0.5,auto,auto:0.95`; words stay words, for `calibrated_fields`.

    Raises:
        ExitServeError: a part is neither a number above 0 nor such a word.
    """
    found: list[float | str] = []
    for part in (part.strip() for part in text.split(",") if part.strip()):
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


def calibrated_fields(word: str) -> dict[str, float | str]:
    """What a request sends for `auto`, or for `auto:0.95`: another promised agreement."""
    _, _, target = word.partition(":")
    return {"exit_target": float(target)} if target else {"exit_threshold": AUTO}


def modes_of(text: str) -> list[Mode]:
    """Reads `confidence,defer`.

    Raises:
        ExitServeError: a part is no mode that has a threshold.
    """
    known: dict[str, Mode] = {mode: mode for mode in BY_CONFIDENCE}
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if part not in known:
            raise ExitServeError(f"--modes {part!r} is unknown; allowed: {', '.join(known)}.")
    return [known[part] for part in parts]


def at_least(least: int, value: int, flag: str) -> int:
    """Returns `value`; raises `ExitServeError` if it is below `least`."""
    if value < least:
        raise ExitServeError(f"{flag} must be at least {least}, not {value}.")
    return value
