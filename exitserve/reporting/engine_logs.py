"""Sends what engines print on the error stream to a log file instead of the screen.

vLLM's processes, its libraries and their C++ parts all write warnings there, most of them before
any logging is configured. They inherit the stream from this process, so its file descriptor is
redirected while they run. vLLM's own errors go to standard output and stay visible.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from exitserve.errors import ExitServeError

STDERR = 2


@contextmanager
def visible_stderr() -> Iterator[TextIO]:
    """A copy of the error stream that stays on the screen inside `redirect_stderr`."""
    with os.fdopen(os.dup(STDERR), "w", buffering=1, encoding="utf-8") as stream:
        yield stream


@contextmanager
def redirect_stderr(log: Path) -> Iterator[None]:
    """Sends the error stream of this process, and of those it starts, to `log`.

    If the block fails, the log is shown too, except for a user's mistake (`ExitServeError`),
    whose message says enough.
    """
    failed = False
    sys.stderr.flush()
    kept = os.dup(STDERR)
    with log.open("wb") as sink:
        os.dup2(sink.fileno(), STDERR)
    try:
        yield
    except Exception as error:
        failed = not isinstance(error, ExitServeError)
        raise
    finally:
        sys.stderr.flush()
        os.dup2(kept, STDERR)
        os.close(kept)
        if failed:
            with log.open(encoding="utf-8", errors="replace") as lines:
                shutil.copyfileobj(lines, sys.stderr)
