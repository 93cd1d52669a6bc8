"""The liveness probe of the Kubernetes manifests on a real server whose engine is held still."""

from pathlib import Path

import httpx
import pytest

from ..forks import LocalServer
from .engines import held_still, probe, started_by

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")


def test_it_tells_an_engine_that_hangs_where_health_does_not(server: LocalServer) -> None:
    assert probe(server, 60).returncode == 0
    engine = started_by(server)
    assert engine
    with held_still(engine):
        hung = probe(server, 2)
        assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
    assert hung.returncode == 1
    assert "the engine hangs" in hung.stderr
    assert probe(server, 60).returncode == 0
