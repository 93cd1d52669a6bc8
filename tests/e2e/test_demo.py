"""`exitserve demo` as a new user runs it, on the bundled model, but for the compilation.

Its processes are forks of one that has imported all: tests/forks.py.
"""

import json
import os
import re
import time
from pathlib import Path

import httpx
import pytest

from ..forks import PythonProcess, free_port, stop

pytestmark = pytest.mark.nightly

START_SECONDS = 300.0


def test_the_demo_shows_depths_and_a_comparison(shipped: Path, tmp_path: Path) -> None:
    log = tmp_path / "printed"
    demo = PythonProcess(
        "exitserve",
        f"demo --enforce-eager --max-tokens 16 --seconds 0 --out {tmp_path}".split(),
        log,
        os.environ,
    )
    code, printed = demo.wait(1200), log.read_text()
    assert code == 0, printed[-4000:]
    promise = "promised 98% of full depth's tokens"
    for words in ("full depth: mean depth 24.00", promise, "plain vLLM", "report.md"):
        assert words in printed
    report = json.loads((tmp_path / "bench" / "report.json").read_text())
    modes = ["plain", "off", "defer", "verify"]
    assert {case["mode"] for case in report["cases"]} == set(modes)
    early = [case for case in report["cases"] if case["mode"] == "defer"]
    # On a busy machine the clock may find, in so few passes, that exits do not pay.
    assert all(case["depth_speedup"] >= 1 for case in early)
    assert all(0.9 < case["agreement"] <= 1 for case in early)


def test_serving_prints_where_the_playground_is(shipped: Path, tmp_path: Path) -> None:
    log, port = tmp_path / "printed", free_port()
    arguments = ["demo", "--serve", "--enforce-eager", "--port", str(port)]
    demo = PythonProcess("exitserve", arguments, log, os.environ)
    try:
        deadline, found = time.monotonic() + START_SECONDS, None
        while found is None:
            assert demo.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.2)
            printed = log.read_text() if log.exists() else ""
            found = re.search(r"playground at (\S+)", printed)
        address = found[1]
        assert address == f"http://127.0.0.1:{port}/exitserve/playground"
        while _status(address) is None and time.monotonic() < deadline:
            time.sleep(0.1)  # it is printed a moment before the server listens
        assert "<title>exitserve playground</title>" in httpx.get(address).text
        assert _status(f"{address}/main.js") == 200
        stats = httpx.get(f"http://127.0.0.1:{port}/exitserve/stats").json()
        assert stats["num_layers"] == 24 and stats["offers"]["promises"]
    finally:
        stop(demo)  # type: ignore[arg-type]  # it has what `stop` uses
    assert demo.returncode == 0, "told to end, it ends as it should"


def _status(url: str) -> int | None:
    try:
        return httpx.get(url, timeout=5).status_code
    except httpx.TransportError:
        return None
