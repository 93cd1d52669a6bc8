"""Screens: what a score means, and files that change together with thresholds."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exitserve.checkpoint.block import MultiExit, write_multi_exit
from exitserve.errors import ExitServeError
from exitserve.screens import KNOTS, Screen, load_screens, save_screens

SCRIPT = Path(__file__).with_name("killed_while_writing.py")
SHARES = st.floats(0.001, 0.999)


def screen(value: float = 1.0, slope: float = 1.5) -> Screen:
    """One whose offset falls as the threshold rises, as chances do."""
    inner = torch.full((3, 4), value)
    offset = torch.tensor([-math.log(one / (1.0 - one)) for one in KNOTS])
    meaning = torch.full((len(KNOTS),), slope), offset
    return Screen(inner, torch.zeros(3), torch.ones(3), torch.zeros(1), *meaning)


@given(SHARES, SHARES)
def test_the_least_score_is_where_a_check_breaks_even(threshold: float, rate: float) -> None:
    own = screen()
    least = own.least_score(threshold, rate)
    chance = own.chance(torch.tensor([least - 0.1, least, least + 0.1]), threshold)
    assert chance[1].item() == pytest.approx(rate, abs=1e-4)
    assert chance[0] < chance[1] < chance[2]


def test_a_score_is_of_the_row_alone() -> None:
    drawn = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 4, generator=drawn)
    own = screen(0.3)
    alone = torch.cat([own.score(row[None]) for row in rows])
    torch.testing.assert_close(own.score(rows), alone)
    assert own.score(rows.bfloat16()).dtype == torch.float32


def test_a_kill_at_any_step_leaves_screens_and_thresholds_that_match(tmp_path: Path) -> None:
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


def block(name: str | None) -> MultiExit:
    return MultiExit(exit_layers=(2, 4), screens=name)


def test_only_screens_that_the_config_names_stay(model: Path) -> None:
    for value in (0.5, 1.5):
        write_multi_exit(model, block(save_screens(model, {2: screen(value)})))
    name = save_screens(model, {2: screen(1.5)})
    assert [path.stem for path in (model / "exit_screens").iterdir()] == [name], "as it was"
    file = block(name).screens_file
    assert file is not None
    found = load_screens(model, file, [2, 4])
    assert found.keys() == {2}, "at 4 every check is made"
    for kept, written in zip(vars(found[2]).values(), vars(screen(1.5)).values(), strict=True):
        assert torch.equal(kept, written)
    write_multi_exit(model, block(None))
    assert list((model / "exit_screens").iterdir()) == []


def test_screens_of_another_checkpoint_are_refused(model: Path) -> None:
    """As where a folder was copied by hand, or a copy was cut off."""
    one, other = (save_screens(model, {2: screen(value)}) for value in (0.5, 1.5))
    folder = model / "exit_screens"
    shutil.copyfile(folder / f"{other}.safetensors", folder / f"{one}.safetensors")
    with pytest.raises(ExitServeError, match="not what was written"):
        load_screens(model, f"exit_screens/{one}.safetensors", [2])


def test_what_linked_screens_point_to_stays(model: Path, tmp_path: Path) -> None:
    """As in the cache of a model hub; the same screens again, and then others."""
    name = save_screens(model, {2: screen(0.5)})
    write_multi_exit(model, block(name))
    file, blob = model / "exit_screens" / f"{name}.safetensors", tmp_path / "blob"
    before = file.read_bytes()
    file.rename(blob)
    file.symlink_to(blob)
    for value in (0.5, 1.5):
        write_multi_exit(model, block(save_screens(model, {2: screen(value)})))
    assert blob.read_bytes() == before and not file.exists()
