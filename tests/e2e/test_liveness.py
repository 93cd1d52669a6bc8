"""The liveness probe of the Kubernetes manifests on a real server whose engine is held still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from exitserve.server.local_server import LocalServer

PROBE = Path(__file__).parents[2] / "deploy" / "kubernetes" / "base" / "alive.py"

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")


def probe(server: LocalServer, wait: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROBE), "--url", server.url, "--wait", str(wait)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def engine_of(server: LocalServer) -> list[psutil.Process]:
    """The server's processes but itself."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):  # gone meanwhile
            if process.pid != server.pid and os.getpgid(process.pid) == server.pid:
                found.append(process)
    return found


def test_it_tells_an_engine_that_hangs_where_health_does_not(server: LocalServer) -> None:
    assert probe(server, 60).returncode == 0
    engine = engine_of(server)
    assert engine
    for process in engine:
        process.send_signal(signal.SIGSTOP)
    try:
        hung = probe(server, 2)
        assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
    finally:
        for process in engine:
            process.send_signal(signal.SIGCONT)
    assert hung.returncode == 1
    assert "the engine hangs" in hung.stderr
    assert probe(server, 60).returncode == 0
