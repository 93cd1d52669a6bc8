"""Progress of long work, on the error stream: a bar on a terminal, lines of text in a log file.

Light to import: rich is loaded when a bar is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

Item = TypeVar("Item")

ShareProgress = Callable[[str, float], None]
"""Called with what is being done, and the share of all work that is done, 0..1."""
StepProgress = Callable[[str, int, int], None]
"""Called with what is being done, how many of its steps are done, and how many there are."""


def _bars(*columns: ProgressColumn, stream: TextIO | None = None, transient: bool) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True) if stream is None else Console(file=stream)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        console=console,
        disable=not console.is_terminal,
        transient=transient,
        # With a stream of its own, what others write to the error stream goes elsewhere.
        redirect_stderr=stream is None,
    )


@contextmanager
def share_bar(stream: TextIO | None = None, *, transient: bool = False) -> Iterator[ShareProgress]:
    """One bar for all work, whose description changes.

    Args:
        stream: instead of the error stream.
        transient: the work is short, so that nothing of it stays: neither bar nor lines.
    """
    from rich.progress import TimeElapsedColumn, TimeRemainingColumn

    bars = _bars(TimeElapsedColumn(), TimeRemainingColumn(), stream=stream, transient=transient)
    bar = bars.add_task("", total=1.0)
    shown, begun = "", time.monotonic()

    def progress(doing: str, done: float) -> None:
        nonlocal shown
        bars.update(bar, description=doing, completed=done)
        if doing != shown and not transient:
            _line(bars, f"[{done:4.0%}, {time.monotonic() - begun:.0f} s] {doing}")
        shown = doing

    with bars:
        yield progress


@contextmanager
def step_bars() -> Iterator[StepProgress]:
    """One bar for each kind of work, with a count of its steps."""
    from rich.progress import MofNCompleteColumn, TimeElapsedColumn

    bars = _bars(MofNCompleteColumn(), TimeElapsedColumn(), transient=False)
    begun: dict[str, Any] = {}

    def progress(doing: str, done: int, total: int) -> None:
        if doing not in begun:
            for bar in begun.values():  # work that ended early shows as done
                bars.stop_task(bar)
            begun[doing] = bars.add_task(doing, total=total)
            _line(bars, f"{doing} ({total})")
        bars.update(begun[doing], completed=done)

    with bars:
        yield progress


def counted(
    items: Iterable[Item], doing: str, total: int | None = None, done: int = 0, *, lines: int = 0
) -> Iterator[Item]:
    """Counts the items by a bar, behind the `done` of earlier; in a log file by so many lines."""
    from rich.progress import MofNCompleteColumn, TimeElapsedColumn

    with _bars(MofNCompleteColumn(), TimeElapsedColumn(), transient=not lines) as bars:
        shown = bars.track(items, total, done, description=doing)
        for number, item in enumerate(shown, done + 1):
            if lines and total and (number % max(1, total // lines) == 0 or number == total):
                _line(bars, f"{doing}: {number:,} of {total:,}")
            yield item


@contextmanager
def byte_bar(doing: str, total: int) -> Iterator[Callable[[int], None]]:
    """One bar for `total` bytes; called with the size of each piece that is done."""
    from rich.progress import DownloadColumn

    bars = _bars(DownloadColumn(binary_units=True), transient=False)
    bar = bars.add_task(doing, total=total)
    with bars:
        yield lambda count: bars.advance(bar, count)


def _line(bars: Progress, text: str) -> None:
    """Stands in for the bar in a log file."""
    if not bars.console.is_terminal:
        bars.console.print(text, markup=False, highlight=False)
