"""Keeps what the engines print while they load off the screen, and loses none of it.

vLLM's processes, its libraries and their C++ parts all write warnings to the error stream, most
of them before any logging is configured. They inherit the stream from us, so it is pointed at a
file while they run. vLLM's own errors go to standard output and are seen at once.
"""

from __future__ import annotations

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
    """The error stream as it is now; it stays so inside `redirect_stderr`."""
    with os.fdopen(os.dup(STDERR), "w", buffering=1, encoding="utf-8") as stream:
        yield stream


@contextmanager
def redirect_stderr(log: Path) -> Iterator[None]:
    """Sends the error stream of this process, and of those it starts, to `log`.

    Where the block fails, the log is shown too, unless the user's mistake is known: that has a
    message of its own.
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
