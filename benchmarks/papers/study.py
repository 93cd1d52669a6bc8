"""A study: runs of variants and seeds, what is kept of each, and going on where it stopped.

What a run leaves is written to the study's JSON as soon as it is done; started again, the study
skips what is there. Before it starts it says how long it will take on this machine.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from exitserve.report import machine, versions, write_json
from exitserve_training.pipeline import run as train
from exitserve_training.recipe import parse_recipe

RESULTS = Path(__file__).parents[2] / "docs" / "papers" / "results"
PROBE_STEPS = 20

Measured = dict[str, Any]
Measure = Callable[[Path], Measured]
"""A trained checkpoint to what is kept of it."""


@dataclass(frozen=True)
class Run:
    """One variant with one seed."""

    variant: str
    seed: int
    recipe: dict[str, Any]
    """As a recipe file has it, without `output_dir` and `seed`."""
    measure: Measure

    @property
    def name(self) -> str:
        """Its key in the results."""
        return f"{self.variant}/{self.seed}"

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return int(self.recipe["training"]["max_steps"])


class Study:
    """Named runs, and the file of their results."""

    def __init__(self, name: str, runs: Sequence[Run], results: Path = RESULTS) -> None:
        """Reads what is there already."""
        self.name = name
        self.runs = list(runs)
        self.file = results / f"{name}.json"
        self.found: dict[str, Measured] = {}
        if self.file.is_file():
            self.found = json.loads(self.file.read_text(encoding="utf-8"))["runs"]

    def go_on(self) -> None:
        """Makes the runs that are missing."""
        console = Console()
        missing = [run for run in self.runs if run.name not in self.found]
        if not missing:
            console.print(f"{self.name}: all {len(self.runs)} runs are in {self.file.name}")
            return
        console.print(
            f"{self.name}: {len(missing)} of {len(self.runs)} runs to make, about "
            f"{_minutes(_estimate(missing))} on this machine"
        )
        started, steps = time.perf_counter(), 0
        for number, run in enumerate(missing, start=1):
            self.found[run.name] = _made(run)
            self._write()
            steps += run.steps
            left = sum(one.steps for one in missing[number:])
            seconds = (time.perf_counter() - started) / steps * left
            console.print(
                f"{self.name}: {run.name} done ({number} of {len(missing)}), "
                f"about {_minutes(seconds)} left"
            )

    def _write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        order = [run.name for run in self.runs if run.name in self.found]
        write_json(
            self.file,
            {
                "schema_version": 1,
                "study": self.name,
                "command": shlex.join(["python", f"benchmarks/papers/{Path(sys.argv[0]).name}"]),
                "machine": machine(),
                "versions": versions(),
                "runs": {name: self.found[name] for name in order},
            },
        )


def _made(run: Run) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        output = _trained(run, Path(folder) / "run", {})
        seconds = time.perf_counter() - started
        return {"seconds": round(seconds, 1), "steps": run.steps, **run.measure(output)}


def _trained(run: Run, output: Path, training: dict[str, Any]) -> Path:
    quiet = {"disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
    recipe = {**run.recipe, "output_dir": str(output), "seed": run.seed}
    recipe["training"] = {**run.recipe["training"], **quiet, **training}
    train(parse_recipe(recipe))
    return output


def _estimate(runs: Sequence[Run]) -> float:
    """Seconds that the runs will take, from a few steps of the first one."""
    short = {"max_steps": PROBE_STEPS, "warmup_steps": 0}
    with tempfile.TemporaryDirectory() as folder:
        # The first imports and compiles what all later ones have.
        _trained(runs[0], Path(folder) / "first", {**short, "max_steps": 1})
        started = time.perf_counter()
        output = _trained(runs[0], Path(folder) / "second", short)
        whole = time.perf_counter() - started
        report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    stepping = float(report["seconds"])
    return sum(whole - stepping + stepping / PROBE_STEPS * run.steps for run in runs)


def _minutes(seconds: float) -> str:
    minutes = max(round(seconds / 60), 1)
    if minutes >= 90:
        return f"{seconds / 3600:.1f} hours"
    return f"{minutes} minute{'s' if minutes > 1 else ''}"
