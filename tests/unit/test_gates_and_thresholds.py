"""Gates and thresholds are one change, and gates are those that were written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exitserve.checkpoint import MultiExit, write_multi_exit
from exitserve.errors import ExitServeError
from exitserve.gates import Gate, load_gates, save_gates

SCRIPT = Path(__file__).with_name("killed_while_writing.py")


def test_a_kill_at_any_step_leaves_gates_and_thresholds_that_match(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    for kind, left in json.loads(done.stdout).items():
        old = None if kind == "linked" else 0.25
        assert left == sorted(left, key=lambda value: value == 0.75), "one moment of change"
        assert set(left) == {old, 0.75} and len(left) > 5, "before it and after it"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 6}')
    return tmp_path


def gates(value: float) -> dict[int, Gate]:
    return {2: Gate(torch.full((4,), value), torch.tensor(value))}


def block(name: str) -> MultiExit:
    return MultiExit(exit_layers=(2,), criterion="gate", gates=name)


def test_only_gates_that_the_config_names_stay(model: Path) -> None:
    for value in (0.5, 1.5):
        write_multi_exit(model, block(save_gates(model, gates(value))))
    name = save_gates(model, gates(1.5))
    assert [path.stem for path in (model / "exit_gates").iterdir()] == [name], "as it was"
    file = block(name).gates_file
    assert file is not None
    found = load_gates(model, file, [2])[2]
    assert (found.weight.tolist(), float(found.bias)) == ([1.5] * 4, 1.5)
    write_multi_exit(model, MultiExit(exit_layers=(2,)))
    assert list((model / "exit_gates").iterdir()) == []


def test_gates_of_another_checkpoint_are_refused(model: Path) -> None:
    """As where a folder was copied by hand, or a copy was cut off."""
    one, other = save_gates(model, gates(0.5)), save_gates(model, gates(1.5))
    shutil.copyfile(
        model / "exit_gates" / f"{other}.safetensors", model / "exit_gates" / f"{one}.safetensors"
    )
    with pytest.raises(ExitServeError, match="not what was written"):
        load_gates(model, f"exit_gates/{one}.safetensors", [2])


def test_what_linked_gates_point_to_stays(model: Path, tmp_path: Path) -> None:
    """As in the cache of a model hub; the same gates again, and then others."""
    name = save_gates(model, gates(0.5))
    write_multi_exit(model, block(name))
    file, blob = model / "exit_gates" / f"{name}.safetensors", tmp_path / "blob"
    before = file.read_bytes()
    file.rename(blob)
    file.symlink_to(blob)
    for value in (0.5, 1.5):
        write_multi_exit(model, block(save_gates(model, gates(value))))
    assert blob.read_bytes() == before and not file.exists()
