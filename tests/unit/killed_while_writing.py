"""Ends a process at every step of writing a calibration, and says what each left behind.

    python killed_while_writing.py FOLDER

Run as a process of its own, since it forks. Prints JSON, a list for each of `CASES`: for each step
at which the process ended, and for the run that did not end early, the value of the thresholds
that the checkpoint has then, which is that of its exit rows too; null where there is none yet.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from exitserve.calibration.command import _write
from exitserve.checkpoint.block import MultiExit, read_multi_exit, write_multi_exit
from exitserve.checkpoint.calibration import Calibration, OperatingPoint
from exitserve.checkpoint.exit_rows import load_exit_rows, save_exit_rows
from exitserve.engine.launch import check_rules

KILLED = 9
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.chmod", "os.symlink", "shutil.copyfile")
OLD, NEW = 0.25, 0.75
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 6,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
}


def block_of(value: float, rows: str | None) -> MultiExit:
    """A block whose thresholds are this value."""
    calibration = Calibration(
        target="agreement>=0.9",
        mode="confidence",
        criterion="max_prob",
        confidence_level=0.95,
        num_layers=6,
        chosen=OperatingPoint(agreement=0.9, thresholds={2: value}, eos_thresholds={2: 1.0}),
    )
    return MultiExit(exit_layers=(2,), rows=rows, calibration=calibration)


def rows_of(value: float) -> list[int]:
    """Exit rows that tell this value."""
    return [1, round(20 * value)]


def without_rows(folder: Path) -> None:
    """A checkpoint that has none."""
    write_multi_exit(folder, block_of(OLD, None))


def with_rows(folder: Path) -> None:
    """A checkpoint that names its exit rows."""
    write_multi_exit(folder, block_of(OLD, save_exit_rows(folder, rows_of(OLD))))


CASES: dict[str, tuple[Callable[[Path], None], bool]] = {
    "none to rows": (without_rows, True),
    "rows to rows": (with_rows, True),
    "rows to none": (with_rows, False),
    "linked": (with_rows, True),
}
"""The checkpoint before, and whether the new one has exit rows."""


def kill_at(step: int) -> None:
    """Ends this process, as a kill does, before the change of that number to any file."""
    seen = 0

    def count() -> None:
        nonlocal seen
        seen += 1
        if seen == step:
            os._exit(KILLED)

    def on(event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes or event in CHANGES:
            count()

    fsync = os.fsync

    def counted(descriptor: int) -> None:
        count()  # no event of its own
        fsync(descriptor)

    os.fsync = counted
    sys.addaudithook(on)


def ended_at(step: int, act: Callable[[], None]) -> bool:
    """Whether the process that does this ended at that step, rather than by itself."""
    child = os.fork()
    if child == 0:
        kill_at(step)
        act()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


def value_in(folder: Path) -> float | None:
    """The value of the thresholds, and of the exit rows if there are any."""
    if not (folder / "config.json").exists():
        return None
    block = read_multi_exit(folder)
    assert block is not None and block.calibration is not None
    check_rules(folder, {})
    value = block.calibration.chosen.thresholds[2]
    if block.rows_file is not None:
        rows = load_exit_rows(folder, block.rows_file)
        assert rows.tolist() == rows_of(value), "rows of other thresholds"
    return value


def left_behind(kind: str, work: Path) -> list[float | None]:
    """What was there after each step."""
    prepare, cuts = CASES[kind]
    found: list[float | None] = []
    block = replace(block_of(NEW, None), calibration=None)
    calibration = block_of(NEW, None).calibration
    assert calibration is not None
    rows = rows_of(NEW) if cuts else None
    result: Any = SimpleNamespace(criterion="max_prob", exit_rows=rows)
    ended = True
    while ended:
        model = work / f"step-{len(found)}"
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(CONFIG))
        save_file({"weight": np.zeros(1)}, model / "model.safetensors")
        prepare(model)
        target = model
        if kind == "linked":
            target = work / f"linked-{len(found)}"
            target.mkdir()

        def act(model: Path = model, target: Path = target) -> None:
            _write(model, target, block, calibration, result)

        ended = ended_at(len(found) + 1, act)
        found.append(value_in(target))
        if kind == "linked":
            assert value_in(model) == OLD
            shutil.rmtree(target)
            target.mkdir()
        act()  # again: nothing is in its way, and nothing of the first attempt stays
        assert value_in(target) == NEW
        left = [path.name for path in (target / "exit_rows").glob("*")]
        assert len(left) == cuts, left
    return found


if __name__ == "__main__":
    print(json.dumps({kind: left_behind(kind, Path(sys.argv[1]) / kind) for kind in CASES}))
