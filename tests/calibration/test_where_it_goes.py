"""Where a calibration goes, and what is found out before the work starts."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from exitserve.checkpoint.adapters import merged_checkpoint
from exitserve.checkpoint.block import MultiExit, read_multi_exit, write_multi_exit
from exitserve.checkpoint.calibration import OperatingPoint
from exitserve.checkpoint.exit_rows import load_exit_rows, save_exit_rows
from exitserve.cli import main
from exitserve.engine.launch import check_rules

from ..shapes import calibration_of

CALIBRATION = calibration_of(
    OperatingPoint(agreement=0.99, thresholds={6: 0.5}, eos_thresholds={6: 1.0}),
    mode="confidence",
    criterion="margin",
    num_layers=24,
    exit_rows="frequent",
)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_read_only: list[Path] = []


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    """As the kernel refuses changes on a read-only file system, to the superuser too."""
    changes = event in ("os.mkdir", "os.rename", "os.remove", "os.symlink", "os.chmod")
    if not _read_only or not (changes or (event == "open" and args[2] & WRITES)):
        return
    for path in args[1:2] if event == "os.symlink" else args[:2]:  # what it points to stays
        if isinstance(path, str | os.PathLike):
            folder = Path(path).parent.resolve()
            if any(folder.is_relative_to(one) for one in _read_only):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


@pytest.fixture(scope="module")
def audited() -> None:
    sys.addaudithook(_refuse)  # for good, but it does nothing without a folder


@pytest.fixture
def read_only(audited: None) -> Iterator[Callable[[Path], None]]:
    yield lambda folder: _read_only.append(folder.resolve())
    _read_only.clear()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The models whose calibration was started; it is made up, with exit rows."""
    models: list[Path] = []

    def calibrate(args: Any, directory: Path, *rest: Any) -> tuple[Any, ...]:
        models.append(directory)
        promised = [SimpleNamespace(point=CALIBRATION.chosen)]
        found = SimpleNamespace(criterion="margin", promised=promised, exit_rows=[2, 5])
        return CALIBRATION, {"": {}}, found

    def show_report(out: Path, data: Any) -> None:
        (out / "report.json").write_text("{}")

    monkeypatch.setattr("exitserve.calibration.calibrate.calibrate", calibrate)
    monkeypatch.setattr("exitserve.calibration.page.show_report", show_report)
    return models


@pytest.fixture
def model(bundled: Path, tmp_path: Path) -> Path:
    """With exit rows already, which are others."""
    copy = Path(shutil.copytree(bundled, tmp_path / "model"))
    name = save_exit_rows(copy, [1])
    write_multi_exit(copy, MultiExit(exit_layers=(6, 12, 18), rows=name))
    return copy


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def calibrate(model: Path | str, *more: str) -> int:
    return main(["calibrate", str(model), "--data", "none.txt", *more])


def assert_calibrated(folder: Path) -> None:
    """Served with the new thresholds and rows, the weights being those of the model."""
    block = read_multi_exit(folder)
    assert block is not None and block.calibration == CALIBRATION
    assert check_rules(folder, {}).default.by_layer == ((6, 0.5, float("inf")),)
    assert len(list((folder / "exit_rows").iterdir())) == 1
    assert block.rows_file is not None
    assert load_exit_rows(folder, block.rows_file).tolist() == [2, 5]
    assert AutoModelForCausalLM.from_pretrained(folder).config.num_hidden_layers == 24


def test_into_the_model(started, model: Path) -> None:
    assert calibrate(model) == 0
    assert (model / "calibration" / "report.json").is_file()
    assert_calibrated(model)


def test_into_an_adapter(
    started, read_only, capsys, make_adapter, merged_cache: Path, model: Path, tmp_path: Path
) -> None:
    """Its base and what is cached of both are as good as read-only."""
    adapter = make_adapter(model, exits=(6, 12, 18))
    before = contents(model)
    assert calibrate(model, "--adapter", str(adapter)) == 0
    (merged,) = started
    assert contents(model) == before and merged.is_relative_to(merged_cache)
    said = capsys.readouterr().out
    assert f"Written into {adapter}/multi_exit.json" in said
    assert f"`exitserve serve {model} --adapter {adapter}` uses it" in said
    assert (adapter / "calibration" / "report.json").is_file()
    assert merged_checkpoint(str(model), str(adapter)) == merged
    assert_calibrated(merged)

    read_only(adapter)
    assert calibrate(model, "--adapter", str(adapter)) == 2
    assert f"'{adapter}' cannot be written to" in capsys.readouterr().err
    out = tmp_path / "out"
    assert calibrate(model, "--adapter", str(adapter), "--out", str(out)) == 0
    assert f"`exitserve serve {model} --adapter {out}` uses it" in capsys.readouterr().out
    assert_calibrated(merged_checkpoint(str(model), str(out)))


def test_a_model_that_cannot_be_written_to(
    started, read_only, capsys, model: Path, tmp_path: Path
) -> None:
    before = contents(model)
    read_only(model)
    assert calibrate(model) == 2 and not started, "before the work"
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert f"'{model}' cannot be written to" in error and "--out DIR" in error
    out = tmp_path / "out"
    assert calibrate(model, "--out", str(out)) == 0
    assert f"exitserve serve {out}" in capsys.readouterr().out
    assert contents(model) == before
    assert (out / "calibration" / "report.json").is_file()
    assert (out / "model.safetensors").is_symlink()
    assert_calibrated(out)


def test_a_report_that_cannot_be_written(
    started, read_only, capsys, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    read_only(out)
    for more in ((), ("--dry-run",)):
        assert calibrate(model, "--out", str(out), *more) == 2 and not started
        assert f"'{out}' cannot be written to" in capsys.readouterr().err


def test_a_disk_that_fails_meanwhile(started, read_only, capsys, model: Path, monkeypatch) -> None:
    before = contents(model)

    def late(out: Path, data: Any) -> None:
        read_only(model)

    monkeypatch.setattr("exitserve.calibration.page.show_report", late)
    assert calibrate(model) == 2 and started
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "Read-only file system" in error
    kept = str(model / "calibration" / "unfinished.sqlite")
    assert contents(model).keys() - before.keys() == {kept}, "the next run goes on from there"
    assert before.items() <= contents(model).items()
