"""`exitserve demo` as a new user runs it, on the bundled model, but for the compilation.

Its processes are forks of one that has imported all: tests/forks.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..forks import PythonProcess


def test_the_demo_shows_depths_and_a_comparison(bundled: Path, tmp_path: Path) -> None:
    log = tmp_path / "printed"
    demo = PythonProcess(
        "exitserve", ["demo", "--enforce-eager", "--out", str(tmp_path)], log, os.environ
    )
    code, printed = demo.wait(800), log.read_text()
    assert code == 0, printed[-4000:]
    for words in ("full depth: mean depth 12.00", "exit threshold 0.4", "plain vLLM", "report.md"):
        assert words in printed
    report = json.loads((tmp_path / "bench" / "report.json").read_text())
    assert {case["mode"] for case in report["cases"]} == {"plain", "off", "confidence"}
    early = [case for case in report["cases"] if case["mode"] == "confidence"]
    assert all(case["depth_speedup"] > 1 for case in early)
    assert all(0 < case["agreement"] <= 1 for case in early)
