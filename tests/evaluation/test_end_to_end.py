"""The real thing on the bundled model: a server, a task of lm-eval, held-out text, a report."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ..forks import PythonProcess

pytest.importorskip("lm_eval", reason="tasks are lm-eval's (requirements/cpu.txt)")

TASKS = Path(__file__).parent / "tasks"
ROWS = len((TASKS / "complete_python.jsonl").read_text().splitlines())


def test_eval_end_to_end(bundled: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["eval", str(bundled), "--data", str(TASKS / "complete_python.yaml")]
    arguments += ["--window", "48", "--prompt-tokens", "8", "--windows", "2", "--out", str(out)]
    arguments += ["--thresholds", "0.3", "--modes", "confidence,verify"]
    arguments += ["--tasks", "complete_python", "--task-path", str(TASKS)]
    arguments += ["--enforce-eager", "--dtype", "float32", "--concurrency", "3"]

    # A process of its own, so that the streams are those that a user sees.
    printed, errors = tmp_path / "printed", tmp_path / "errors"
    process = PythonProcess("exitserve", arguments, printed, os.environ, errors)

    assert process.wait() == 0, errors.read_text()

    report = json.loads((out / "report.json").read_text())
    assert report["kind"] == "evaluation" and report["schema_version"] == 1
    assert report["settings"]["data"]["name"] == "complete_python.yaml"
    assert report["settings"]["tasks"]["lm_eval"]
    full, early, verified = report["cases"]
    assert [case["mode"] for case in report["cases"]] == ["off", "confidence", "verify"]
    assert full["agreement"] == 1.0 and full["mean_depth"] == 24

    tasks = [case["tasks"]["complete_python"] for case in report["cases"]]
    for task in tasks:
        assert task["samples"] == ROWS
        assert sum(task["exit_layers"].values()) == task["tokens"] > ROWS
    # The bundled model completes some of the lines.
    assert 0 < tasks[0]["score"] < 1
    assert tasks[0]["exit_layers"] == {"24": tasks[0]["tokens"]}
    assert tasks[1]["mean_depth"] < 24 and set(tasks[1]["exit_layers"]) <= {"6", "12", "18", "24"}
    # Full depth judges every draft, so the answers are its own.
    assert tasks[2] == tasks[0]
    assert verified["perplexity"] == full["perplexity"]
    assert early["mean_depth"] < 24

    assert "complete_python" in (out / "report.md").read_text()
    assert (out / "retention.png").stat().st_size > 10_000
    assert "Minimum retained" in printed.read_text()
    # lm-eval's bars are in the log.
    assert "Requesting API" not in errors.read_text()
    assert "Requesting API" in (out / "eval.log").read_text()
