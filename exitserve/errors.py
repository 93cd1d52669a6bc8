"""The exception for users' mistakes, and how its messages stay short."""

import difflib
import reprlib
from collections.abc import Iterable

LONGEST_LINE = 300
"""Characters of an error that a client gets."""
LONGEST_VALUE = 100
"""Characters of a bad value that an error shows."""
LONGEST_NAME = 60
"""Characters of a mistyped name for which similar words are searched, which takes time."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


class ExitServeError(ValueError):
    """A user's mistake: the message names the bad value, what is allowed, and a fix.

    The command line prints the message as one line and exits with 2; the server answers 400.
    """


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Returns `" Did you mean 'x'?"` for the allowed word closest to `name`, else `""`."""
    if len(name) > LONGEST_NAME:
        return ""
    match = difflib.get_close_matches(name, list(allowed), n=1)
    return f" Did you mean {match[0]!r}?" if match else ""


def install(extra: str) -> str:
    """How an extra is installed, also before there is a release."""
    return f"pip install 'exitserve[{extra}]' (in a checkout: pip install -e '.[{extra}]')"


def shown(value: object) -> str:
    """A bad value as an error shows it: its `repr`, shortened if it is long or nested."""
    return _cut(_SHORT.repr(value), LONGEST_VALUE)


def one_line(message: str) -> str:
    """A message without line breaks, and cut if it is longer than `LONGEST_LINE`."""
    # Of a message of megabytes only the start is worked on.
    return _cut(" ".join(message[: 4 * LONGEST_LINE].split()), LONGEST_LINE)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
