"""`exitserve demo` as a new user runs it, on the bundled model, but for the compilation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_demo_shows_depths_and_a_comparison(bundled: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "exitserve", "demo", "--enforce-eager", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for words in ("full depth: mean depth 12.00", "exit threshold 0.4", "plain vLLM", "report.md"):
        assert words in done.stdout
    report = json.loads((tmp_path / "bench" / "report.json").read_text())
    assert {case["mode"] for case in report["cases"]} == {"plain", "off", "confidence"}
    early = [case for case in report["cases"] if case["mode"] == "confidence"]
    assert all(case["depth_speedup"] > 1 for case in early)
    assert all(0 < case["agreement"] <= 1 for case in early)
