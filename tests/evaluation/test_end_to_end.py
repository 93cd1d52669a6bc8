"""The command on the bundled model: held-out text, a report, traces."""

import json
from pathlib import Path

import pytest

from exitserve.cli import main
from exitserve.evaluation.page import LOSSY

HERE = Path(__file__)


def test_eval_end_to_end(bundled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = ["eval", str(bundled), "--data", str(HERE), "--window", "48", "--windows", "2"]
    arguments += ["--thresholds", "0.3", "--modes", "confidence,verify", "--out", str(out)]
    assert main([*arguments, "--prompt", "def read(path):"]) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["kind"] == "evaluation" and report["schema_version"] == 1
    assert report["settings"]["data"]["name"] == HERE.name
    full, early, verified = report["cases"]
    assert [case["mode"] for case in report["cases"]] == ["off", "confidence", "verify"]
    assert full["agreement"] == 1.0 and full["mean_depth"] == 24
    assert verified["perplexity"] == full["perplexity"]
    assert early["mean_depth"] < 24
    assert early["depth_speedup"] == pytest.approx(24 / early["mean_depth"], abs=1e-3)
    page = (out / "report.md").read_text()
    assert "| threshold 0.3 " in page
    assert page.index(LOSSY) < page.index("| setting"), "the warning comes first"
    assert (out / "retention.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    for name in ("trace-threshold-0.3.json", "trace-verify-0.3.json"):
        assert (out / name).is_file() and name in printed
