"""`exitserve eval` against a server that runs already, under another name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exitserve.cli import main
from exitserve.server.local_server import LocalServer

pytest.importorskip("lm_eval", reason="tasks are lm-eval's (requirements/cpu.txt)")

TASKS = Path(__file__).parents[1] / "evaluation" / "tasks"


def test_a_running_server_is_asked(server: LocalServer, bundled: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["eval", str(bundled), "--data", str(TASKS / "complete_python.yaml")]
    arguments += ["--window", "48", "--prompt-tokens", "8", "--windows", "1", "--out", str(out)]
    arguments += ["--thresholds", "0.3", "--tasks", "complete_python", "--task-path", str(TASKS)]
    assert main([*arguments, "--endpoint", server.url, "--limit", "4", "--chat"]) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["settings"]["tasks"]["server"] == server.url
    tasks = [case["tasks"]["complete_python"] for case in report["cases"]]
    assert [task["samples"] for task in tasks] == [4, 4]
    assert tasks[1]["mean_depth"] < tasks[0]["mean_depth"] == 24


def test_what_the_server_refuses_is_told(
    server: LocalServer, bundled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["eval", str(bundled), "--data", str(TASKS / "complete_python.yaml")]
    arguments += ["--window", "48", "--prompt-tokens", "8", "--out", str(tmp_path / "out")]
    arguments += ["--thresholds", "0.3", "--tasks", "complete_python", "--task-path", str(TASKS)]
    assert main([*arguments, "--modes", "verify", "--endpoint", server.url]) == 2
    error = capsys.readouterr().err
    assert "refuses" in error and "--mode verify" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
