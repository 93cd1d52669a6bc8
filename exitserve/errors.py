"""The exception for users' mistakes, and what its messages are made of."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any

_BRIEF = reprlib.Repr()
_BRIEF.maxlevel = 1


class ExitServeError(ValueError):
    """A user's mistake: the message names the bad value, what is allowed, and a fix.

    The command line prints the message as one line and exits with 2; the server answers 400.
    """


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Returns `" Did you mean 'x'?"` for the allowed word closest to `name`, else `""`."""
    match = difflib.get_close_matches(name, list(allowed), n=1)
    return f" Did you mean {match[0]!r}?" if match else ""


def brief(value: Any) -> str:
    """Returns `repr(value)` for a message: on one line, and cut off where it is long or nested."""
    return _BRIEF.repr(value)
