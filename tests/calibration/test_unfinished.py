"""What an interrupted calibration keeps."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from exitserve.calibration.unfinished import UnfinishedWork
from exitserve.errors import ExitServeError

VALUE: dict[str, Any] = {"a": torch.arange(3.0), "b": [(1, "c"), (2.5, None)]}


def never() -> Any:
    raise AssertionError("it is known")


def test_what_was_found_is_known_until_all_is(tmp_path: Path) -> None:
    first = UnfinishedWork(tmp_path, {"data": "x"})
    first.recall("one", lambda: VALUE)
    later = UnfinishedWork(tmp_path, {"data": "x"})
    assert len(later) == 1
    found = later.recall("one", never)
    assert torch.equal(found["a"], VALUE["a"]) and found["b"] == VALUE["b"]
    assert later.recall("two", lambda: 2) == 2
    later.finish()
    assert not list(tmp_path.iterdir())


def test_a_file_that_came_with_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "harm",)

    work = UnfinishedWork(tmp_path, {})
    work.recall("one", lambda: 1)
    work._database.execute("UPDATE found SET value = ?", (pickle.dumps(Harm(), protocol=2),))
    with pytest.raises(ExitServeError, match="remove it"):
        work.recall("one", never)
    assert not (tmp_path / "harm").exists()


def test_a_disk_that_fails_is_said_in_one_line(tmp_path: Path) -> None:
    work = UnfinishedWork(tmp_path, {})
    work._database.execute("PRAGMA query_only = ON")
    with pytest.raises(ExitServeError, match=r"cannot be used .*readonly"):
        work.recall("one", lambda: 1)
