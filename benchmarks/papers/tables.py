"""Tables and curves out of a study's JSON: mean and standard deviation over seeds."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from exitserve.reporting.report import markdown_table
from exitserve_training.inspect.plots import by_depth

RESULTS = Path(__file__).parents[2] / "docs" / "papers" / "results"

Measured = Mapping[str, Any]
Runs = Mapping[str, Measured]
"""`variant/seed` to what was measured."""
Of = Callable[[Measured], float]
"""One number of a run."""
Column = tuple[str, Of, str]
"""Its header, what it shows, and how numbers are written."""


def runs_of(study: str) -> Runs:
    """The runs of a study."""
    runs: Runs = json.loads((RESULTS / f"{study}.json").read_text(encoding="utf-8"))["runs"]
    return runs


def variants(runs: Runs) -> list[str]:
    """Their variants, in order."""
    return list(dict.fromkeys(name.rpartition("/")[0] for name in runs))


def seeds(runs: Runs, variant: str) -> dict[str, Measured]:
    """What was measured of each seed of a variant."""
    return {
        name.rpartition("/")[2]: run
        for name, run in runs.items()
        if name.rpartition("/")[0] == variant
    }


def values(runs: Runs, variant: str, of: Of) -> list[float]:
    """One number of each seed of a variant."""
    return [of(run) for run in seeds(runs, variant).values()]


def spread(found: Sequence[float], form: str = ".3f") -> str:
    """Mean and standard deviation over seeds; of one seed its number alone."""
    if not found:
        return "-"
    mean = format(statistics.mean(found), form)
    if len(found) == 1:
        return mean
    return f"{mean}±{format(statistics.stdev(found), form.lstrip('+'))}"


def at_depth(group: str, key: str, depth: int) -> Of:
    """A number that a run has for each depth."""
    return lambda run: float(run[group][str(depth)][key])


def at(*keys: str, scale: float = 1.0) -> Of:
    """A number at a place in what was measured, times `scale`."""

    def found(run: Measured) -> float:
        value: Any = run
        for key in keys:
            value = value[key]
        return scale * float(value)

    return found


def numbers_table(study: str, columns: Sequence[Column], only: Sequence[str] = ()) -> str:
    """A line a variant; what a variant does not have stays empty."""
    runs = runs_of(study)
    lines = []
    for variant in only or variants(runs):
        cells = []
        for _, of, form in columns:
            try:
                cells.append(spread(values(runs, variant, of), form))
            except KeyError:
                cells.append("")
        lines.append([variant, *cells])
    return markdown_table(["", *[header for header, _, _ in columns]], lines)


def by_depth_table(study: str, group: str, key: str, depths: Sequence[int], form: str) -> str:
    """A line a variant, a column a depth; depths that a variant lacks stay empty."""
    columns = [(f"depth {depth}", at_depth(group, key, depth), form) for depth in depths]
    runs = runs_of(study)
    having = [name for name in variants(runs) if group in next(iter(seeds(runs, name).values()))]
    return numbers_table(study, columns, having)


def exits_table(study: str, thresholds: Sequence[str], only: Sequence[str] = ()) -> str:
    """Accuracy and depth speedup at some thresholds, and the full model's accuracy."""
    columns: list[Column] = [("full, %", at("full_accuracy", scale=100), ".1f")]
    for one in thresholds:
        columns += [
            (f"τ {one}: %", at("exits", one, "accuracy", scale=100), ".1f"),
            (f"τ {one}: depth speedup", at("exits", one, "depth_speedup"), ".2f"),
        ]
    return numbers_table(study, columns, only)


def steps_to(curve: Mapping[str, float], loss: float) -> float:
    """The step at which a curve of the loss reaches a value; its last step if it never does."""
    points = sorted((int(step), value) for step, value in curve.items())
    for (before, high), (after, low) in itertools.pairwise(points):
        if low <= loss:
            return before + (after - before) * max(0.0, (high - loss) / (high - low))
    return float(points[-1][0])


def against(study: str, baseline: tuple[str, str], columns: Sequence[Column]) -> str:
    """Final losses against a baseline's, seed by seed, with the steps that it took to reach its.

    Args:
        study: the study of the variants.
        baseline: the study and the variant of the baseline, whose seeds are the same.
        columns: what else a line shows.
    """
    plain = seeds(runs_of(baseline[0]), baseline[1])
    runs = runs_of(study)
    lines = []
    for variant in variants(runs):
        own = seeds(runs, variant)
        pairs = [(run, plain[seed]) for seed, run in own.items()]
        differences = [run["loss"] - other["loss"] for run, other in pairs]
        reached = [
            steps_to(run["curve"], other["loss"]) / max(map(int, other["curve"]))
            for run, other in pairs
        ]
        never = any(run["loss"] > other["loss"] for run, other in pairs)
        same = (study, variant) == baseline
        lines.append(
            [
                variant,
                spread([run["loss"] for run in own.values()]),
                "" if same else spread(differences, "+.3f"),
                "" if same else "not by all" if never else spread(reached, ".2f"),
                *[spread([of(run) for run in own.values()], form) for _, of, form in columns],
            ]
        )
    headers = ["", "held-out loss", f"less {baseline[1]}", f"steps to {baseline[1]}'s loss"]
    return markdown_table([*headers, *[header for header, _, _ in columns]], lines)


def along_table(study: str, last_layer: int, columns: Sequence[Column], equal: str) -> str:
    """The first variant's numbers at its end, and how far others are from it, seed by seed.

    Args:
        study: of runs that were measured along training.
        last_layer: whose loss is compared.
        columns: what a line shows beside that loss, or beside the steps.
        equal: `steps`: at the end of both. `loss`: where both have the loss with which the worse
            of the two ends, between the measurements around it.
    """
    runs = runs_of(study)
    first, *others = variants(runs)
    loss = at("layers", str(last_layer), "loss")
    shown: Column = ("loss", loss, ".3f") if equal == "steps" else ("steps", at("step"), ".0f")

    def less(variant: str, seed: str, of: Of) -> float:
        pair = [runs[f"{one}/{seed}"]["along"] for one in (variant, first)]
        worse = max(loss(_last(along)) for along in pair)
        own, other = (_number_at(along, of, loss, worse, equal) for along in pair)
        return own - other

    firsts = [_last(run["along"]) for run in seeds(runs, first).values()]
    every = [shown, *columns]
    lines = [[first, *[spread([of(one) for one in firsts], form) for _, of, form in every]]]
    for name in others:
        shared = [seed for seed in seeds(runs, name) if f"{first}/{seed}" in runs]
        cells = [
            spread([less(name, one, of) for one in shared], f"+{form}") for _, of, form in every
        ]
        lines.append([name, *cells])
    return markdown_table(["", *[header for header, _, _ in every]], lines)


def _last(along: Mapping[str, Measured]) -> Measured:
    """What was measured of a run at its end, with the step."""
    step = max(along, key=int)
    return {"step": step, **along[step]}


def _number_at(along: Mapping[str, Measured], of: Of, loss: Of, value: float, equal: str) -> float:
    """A number of a run at its end, or where its loss comes to a value."""
    if equal == "steps":
        return of(_last(along))
    step = steps_to({one: loss(measured) for one, measured in along.items()}, value)
    points = [of({"step": one, **measured}) for one, measured in along.items()]
    return float(np.interp(step, [float(one) for one in along], points))


def curves(study: str, group: str, key: str, ylabel: str) -> Figure:
    """The means over seeds against depth, a curve a variant."""
    runs = runs_of(study)
    found: dict[str, dict[int, float]] = {}
    for variant in variants(runs):
        known = next(iter(seeds(runs, variant).values()))[group]
        found[variant] = {
            int(depth): statistics.mean(values(runs, variant, at_depth(group, key, int(depth))))
            for depth in known
        }
    return by_depth(found, ylabel, ())


def along_training(
    study: str, of: Callable[[Measured], Mapping[str, float]], ylabel: str, only: Sequence[str] = ()
) -> Figure:
    """Something against optimizer steps: the mean over seeds, and a band of all of them."""
    runs = runs_of(study)
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = figure.subplots()
    for variant in only or variants(runs):
        found = [of(run) for run in seeds(runs, variant).values()]
        steps = sorted(map(int, found[0]))
        columns = [[float(one[str(step)]) for one in found] for step in steps]
        (line,) = axes.plot(steps, list(map(statistics.mean, columns)), marker=".", label=variant)
        axes.fill_between(
            steps,
            list(map(min, columns)),
            list(map(max, columns)),
            color=line.get_color(),
            alpha=0.2,
            linewidth=0,
        )
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
    return figure
