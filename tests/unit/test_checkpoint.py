"""The multi_exit block and what is refused about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exitserve.checkpoint import MultiExit, read_config, read_multi_exit, write_multi_exit
from exitserve.errors import ExitServeError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 6}')
    return tmp_path


def test_what_is_written_is_read(directory: Path) -> None:
    block = MultiExit(exit_layers=(2, 4), calibration={"thresholds": {"2": 0.9}})
    write_multi_exit(directory, block)
    assert read_multi_exit(directory) == block
    assert read_config(directory)["model_type"] == "llama", "the rest of the config is kept"


def test_a_plain_checkpoint_has_no_block(directory: Path) -> None:
    assert read_multi_exit(directory) is None


@pytest.mark.parametrize(
    ("layers", "message"),
    [((0, 2), "out of range"), ((2, 6), r"1\.\.5"), ((4, 2), r"\[2, 4\]"), ((2, 2), "repeats")],
)
def test_exit_layers_must_fit_the_model(layers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ExitServeError, match=message):
        MultiExit(exit_layers=layers).validate(6)


def test_another_version_is_refused(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"multi_exit": {"version": 2}}))
    with pytest.raises(ExitServeError, match="version 2"):
        read_multi_exit(directory)


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "/no/where"])
def test_a_missing_model_is_named(name: str) -> None:
    with pytest.raises(ExitServeError, match="no model directory"):
        read_config(name)


def test_a_directory_without_config_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ExitServeError, match=r"no config\.json"):
        read_config(tmp_path)


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ExitServeError, match="not valid JSON"):
        read_config(tmp_path)
