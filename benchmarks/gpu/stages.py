"""What a stage gets and gives, and how one that is a command runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environment import ROOT

TAIL = 14
"""Lines shown of what failed."""
LAST_WORDS_SECONDS = 15
POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class MainJob:
    """What the stages of `--call real` work on."""

    model: Path | None
    """A checkpoint's folder, or a GGUF file; None: a tiny random one."""
    recipe: Path
    chats: Path | None
    """Rows of `messages`, instead of those that the model writes itself."""
    continue_from: Path | None
    """A folder with what an earlier call has left."""
    out: Path
    """For what this call leaves."""


@dataclass(kw_only=True)
class StageRun:
    """One call of the script."""

    folder: Path
    """For files of one stage that another reads, and logs."""
    deadline: float
    """Of all stages, on the monotonic clock."""
    tiny: bool
    """Without a GPU: to see that the script runs."""
    quick: bool
    both_exits: bool
    rounds: int
    shapes: tuple[str, ...]
    llm: Mapping[str, Any]
    """More arguments of `vllm.LLM`, for all engines."""
    publish: Callable[[str, StageOutcome], None]
    """Writes what a stage has found so far."""
    kernels_tested: bool = False
    """Whether the kernels' tests have just passed."""
    job: MainJob
    pending: list[str] = field(default_factory=list)
    """The stages that have not ended."""

    def left(self, most: float) -> float:
        """Seconds that something may take: `most`, or what is left until the deadline.

        Raises:
            StageError: nothing is left.
        """
        left = self.deadline - time.monotonic()
        if left < 1:
            raise StageError("no time is left: run this stage by itself (--only).")
        return min(most, left)


@dataclass
class StageOutcome:
    """What a stage found."""

    data: dict[str, Any] = field(default_factory=dict)
    """For the JSON file."""
    page: str = ""
    """To be printed at the end."""
    failures: list[str] = field(default_factory=list)
    verdict: list[str] = field(default_factory=list)
    """The page in a line or two, for the end."""
    seconds: float = 0.0


class StageError(Exception):
    """A stage ended early; the message is for the reader."""


def say(text: str) -> None:
    """One line about what is being done."""
    print(f"[{time.monotonic() - _STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


_STARTED = time.monotonic()


def command(
    run: StageRun,
    name: str,
    arguments: Sequence[str],
    most: float,
    variables: Mapping[str, str] | None = None,
    until: Callable[[], bool] = lambda: False,
    wait: Callable[[Path], bool] = lambda _: False,
) -> tuple[int | None, Path]:
    """Runs Python with `arguments` in the root of the checkout.

    Args:
        run: bounds its time.
        name: of its log.
        arguments: of Python.
        most: seconds.
        variables: more of the environment.
        until: asked now and then; interrupts it once it is true.
        wait: asked now and then with its log; the process stands still while it is true.

    Returns:
        Its exit status, None if it had to be interrupted; and the file with all that it printed.

    Raises:
        StageError: there is no time for it.
    """
    log = run.folder / f"{name}.log"
    limit = run.left(most)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=os.environ | (variables or {}),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            end, waits = time.monotonic() + limit, False
            while time.monotonic() < end and not until():
                if wait(log) != waits:
                    waits = not waits
                    process.send_signal(signal.SIGSTOP if waits else signal.SIGCONT)
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(POLL_SECONDS), log
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGINT)  # pytest says what it has found
            with suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS_SECONDS)
            return None, log
        finally:
            with suppress(ProcessLookupError):  # with all processes that it started and left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ended(status: int | None) -> str:
    """How a command ended, which gave this status."""
    return "did not end in time" if status is None else f"ended with status {status}"


def last_lines(log: Path) -> str:
    """The errors that a log names, and its end."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    lines = [line.rstrip()[:220] for line in text.splitlines() if line.strip()]
    # The cause stands far above the end: vLLM's processes each print where they were.
    named = [line for line in lines[:-TAIL] if re.search(r"\b\w*(Error|Exception)\b: ", line)]
    shown = [*dict.fromkeys(named[-4:]), "...", *lines[-TAIL:]] if named else lines[-TAIL:]
    return "Its last lines:\n" + "\n".join(f"    {line}" for line in shown)
