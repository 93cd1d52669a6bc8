"""`exitserve demo` as a new user runs it, on the bundled model, but for the compilation.

Its processes are forks of one that has imported all: tests/forks.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..forks import PythonProcess


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
    modes = ["plain", "off", "defer", "verify", "rival"]
    assert {case["mode"] for case in report["cases"]} == set(modes)
    early = [case for case in report["cases"] if case["mode"] == "defer"]
    assert all(case["depth_speedup"] > 1 for case in early)
    assert all(0.9 < case["agreement"] <= 1 for case in early)
