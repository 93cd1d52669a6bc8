"""A server that is killed outright leaves no process behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from exitserve.server.local_server import LocalServer

OPTIONS = ("--dtype", "float32", "--enforce-eager")


def _descendants(pid: int) -> set[int]:
    """All processes below `pid`."""
    found, border = set[int](), [pid]
    while border:
        for task in Path(f"/proc/{border.pop()}/task").glob("*/children"):
            children = [int(one) for one in task.read_text().split()]
            found |= set(children)
            border += children
    return found


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")
def test_the_engine_ends_with_its_front_end(bundled: Path, tmp_path: Path) -> None:
    with LocalServer(bundled, *OPTIONS, log=tmp_path / "server.log") as server:
        children = _descendants(server.pid)
        engine = {one for one in children if "VLLM" in Path(f"/proc/{one}/cmdline").read_text()}
        assert engine, "the engine core and its worker are processes of their own"
        os.kill(server.pid, signal.SIGKILL)
        deadline = time.monotonic() + 20  # a second or two, on machines that do nothing else
        while time.monotonic() < deadline and any(map(_alive, children)):
            time.sleep(0.2)
        assert [one for one in children if _alive(one)] == []
