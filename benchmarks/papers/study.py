"""A study: runs of variants and seeds, what is kept of each, and going on where it stopped.

What a run leaves is written to the study's JSON as soon as it is done; started again, the study
skips what is there. Before it starts it says how long it will take on this machine, and each run
has the Trainer's own bar in a terminal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from exitserve.reporting.report import machine, versions, write_json
from exitserve_training.pipeline import train
from exitserve_training.recipe import parse_recipe

RESULTS = Path(__file__).parents[2] / "docs" / "papers" / "results"
PROBE_STEPS = 20
SEEDS = 3

T = TypeVar("T")
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
    begin: dict[str, Any] | None = None
    """A recipe that is run first, with the same seed: `recipe` goes on from its model. Runs of a
    seed that begin alike share it."""
    teacher: dict[str, Any] | None = None
    """A recipe that is run first likewise, for `recipe` to learn from what its model predicts."""

    @property
    def name(self) -> str:
        """Its key in the results."""
        return f"{self.variant}/{self.seed}"

    @property
    def steps(self) -> int:
        """Optimizer steps, without those of `begin`."""
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
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as begun:
            for number, run in enumerate(missing, start=1):
                self.found[run.name] = _made(run, Path(begun))
                self._write()
                # By the run: what is measured of one takes its time too, however few its steps.
                seconds = (time.perf_counter() - started) / number * (len(missing) - number)
                console.print(
                    f"{self.name}: {run.name} done ({number} of {len(missing)}), "
                    f"about {_minutes(seconds)} left"
                )

    def _write(self) -> None:
        order = [run.name for run in self.runs if run.name in self.found]
        write_results(self.file, {name: self.found[name] for name in order})


def write_results(file: Path, runs: Mapping[str, Measured]) -> None:
    """Writes what runs left, with the command and the machine that made them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    words = [word for word in sys.argv[1:] if not word.startswith("-") and "/" not in word]
    write_json(
        file,
        {
            "schema_version": 1,
            "study": file.stem,
            "command": shlex.join(
                ["python", f"benchmarks/papers/{Path(sys.argv[0]).name}", *words[:1]]
            ),
            "machine": machine(),
            "versions": versions(),
            "runs": dict(runs),
        },
    )


def seeds_of(variants: Mapping[str, T], seeds: int = SEEDS) -> Iterator[tuple[int, str, T]]:
    """Seed by seed, so that a study that was stopped has whole comparisons."""
    for seed in range(seeds):
        for variant, what in variants.items():
            yield seed, variant, what


def study_command(told: str | None, studies: Mapping[str, Callable[[list[str]], Study]]) -> None:
    """The command line of a paper's studies: goes on with the one that is named."""
    assert told is not None
    parser = argparse.ArgumentParser(
        description=told, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=studies)
    parser.add_argument("--data", nargs="+", required=True, help="see above")
    args = parser.parse_args()
    studies[args.study](args.data).go_on()


def train_quietly(recipe: dict[str, Any], output: Path, seed: int, **training: Any) -> Path:
    """Trains as a recipe says, with nothing on the screen but a bar; returns `output`."""
    quiet = {
        "disable_tqdm": not sys.stderr.isatty(),
        "logging_strategy": "no",
        "save_strategy": "no",
    }
    whole = {**recipe, "output_dir": str(output), "seed": seed}
    whole["training"] = {**quiet, **recipe["training"], **training}
    train(parse_recipe(whole))
    return output


def _made(run: Run, begun: Path) -> Measured:
    recipe = run.recipe
    if run.begin is not None:
        recipe = {k: v for k, v in recipe.items() if k not in ("config", "tokenizer")}
        recipe["model"] = str(_begun(run.begin, run.seed, begun))
    if run.teacher is not None:
        taught = {"name": "kl_to_last", "layers": [recipe["config"]["num_hidden_layers"]]}
        taught["teacher"] = str(_begun(run.teacher, run.seed, begun))
        recipe = {**recipe, "objectives": [*recipe["objectives"], taught]}
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        output = train_quietly(recipe, Path(folder) / "run", run.seed)
        seconds = time.perf_counter() - started
        return {"seconds": round(seconds, 1), "steps": run.steps, **run.measure(output)}


def _begun(recipe: dict[str, Any], seed: int, folder: Path) -> Path:
    """The model that runs of a seed go on from, trained for the first of them."""
    output = folder / hashlib.sha256(json.dumps([recipe, seed]).encode()).hexdigest()[:16]
    return output if output.is_dir() else train_quietly(recipe, output, seed)


def _estimate(runs: Sequence[Run]) -> float:
    """Seconds that the runs will take, from a few steps of the longest one; measuring aside."""
    first = max(runs, key=lambda run: run.steps)
    short = {"max_steps": PROBE_STEPS, "warmup_steps": 0}
    with tempfile.TemporaryDirectory() as folder:
        # The first imports and compiles what all later ones have.
        train_quietly(first.recipe, Path(folder) / "first", 0, **{**short, "max_steps": 1})
        started = time.perf_counter()
        output = train_quietly(first.recipe, Path(folder) / "second", 0, **short)
        whole = time.perf_counter() - started
        report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    stepping = float(report["seconds"])
    return sum(whole - stepping + stepping / PROBE_STEPS * run.steps for run in runs)


def _minutes(seconds: float) -> str:
    minutes = max(round(seconds / 60), 1)
    if minutes >= 90:
        return f"{seconds / 3600:.1f} hours"
    return f"{minutes} minute{'s' if minutes > 1 else ''}"
