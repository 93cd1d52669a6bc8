"""Memory of running processes, for the scripts beside this file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

KINDS = ("RssAnon", "RssFile", "RssShmem")


def resident(process: int) -> Counter[str]:
    """Bytes in memory of a process and its descendants, by kind.

    `RssAnon` is their own, `RssFile` of mapped files (which the kernel may drop at any time),
    `RssShmem` shared. Those that have ended have none.
    """
    found: Counter[str] = Counter()
    folder = Path("/proc") / str(process)
    try:
        for line in (folder / "status").read_text(encoding="utf-8").splitlines():
            kind, _, size = line.partition(":")
            if kind in KINDS:
                found[kind] += int(size.split()[0]) * 1024
        for task in (folder / "task").iterdir():
            for child in (task / "children").read_text(encoding="utf-8").split():
                found += resident(int(child))
    except (FileNotFoundError, ProcessLookupError):
        pass  # it ended meanwhile
    return found
