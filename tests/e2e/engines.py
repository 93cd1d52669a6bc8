"""A server's engine from outside: its processes, holding them still, and the probe that notices."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from ..forks import LocalServer

PROBE = Path(__file__).parents[2] / "deploy" / "kubernetes" / "base" / "alive.py"


def started_by(server: LocalServer) -> list[psutil.Process]:
    """The processes that a server started: the others of its group."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):  # gone meanwhile
            if process.pid != server.pid and os.getpgid(process.pid) == server.pid:
                found.append(process)
    return found


@contextmanager
def held_still(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """They hang inside the `with` block."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def probe(server: LocalServer, wait: float) -> subprocess.CompletedProcess[str]:
    """Runs the liveness probe of the Kubernetes manifests."""
    command = [sys.executable, str(PROBE), "--url", server.url, "--wait", str(wait)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)
