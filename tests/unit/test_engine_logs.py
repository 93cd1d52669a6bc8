"""What the engines print is kept in a file, and shown when they fail."""

import subprocess
import sys
from pathlib import Path

import pytest

from exitserve.reporting.engine_logs import redirect_stderr, visible_stderr


def noise() -> None:
    """From a child process and from this one, past Python's own streams."""
    subprocess.run([sys.executable, "-c", "import os; os.write(2, b'child noise\\n')"], check=True)


def test_children_are_quiet_and_the_bar_is_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    with visible_stderr() as screen, redirect_stderr(log):
        noise()
        print("the bar", file=screen)
    print("afterwards", file=sys.stderr)
    seen = capfd.readouterr().err
    assert "the bar" in seen
    assert "afterwards" in seen
    assert "noise" not in seen
    assert log.read_text() == "child noise\n"


def test_a_failure_shows_what_was_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), redirect_stderr(tmp_path / "log"):
        noise()
        raise RuntimeError("the engine died")
    assert "child noise" in capfd.readouterr().err
