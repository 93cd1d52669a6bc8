"""All measurements of one checkpoint."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from exitserve.errors import ExitServeError
from exitserve.reporting.report import machine, versions
from exitserve_training.inspect import plots
from exitserve_training.inspect.condensation import trend
from exitserve_training.inspect.data import (
    InspectionData,
    InspectionSettings,
    load_inspection_data,
    prompts,
)
from exitserve_training.inspect.generation import generate_texts, sentence_embedder
from exitserve_training.inspect.measurements import LayerMeasurements, measure_layers
from exitserve_training.inspect.probe import linear_probe, minimal_depth
from exitserve_training.inspect.similarity import centred, cka_matrix, cos_matrix, cosines, nc1
from exitserve_training.models import model_to_run, trained_exits
from exitserve_training.parts import Task

SHARES = (0.9, 0.95, 0.99)
"""Shares of the last layer's accuracy for which the minimal depth is reported."""
MOST_CLASSES = 20
"""NC1 and probes of a language model take this many most frequent tokens as classes."""
FEWEST_SAMPLES = 20
"""Classes with fewer sampled states are left out of NC1 and probes."""
QUARTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Inspection:
    """The report and its pictures."""

    report: dict[str, Any]
    figures: dict[str, Figure]


def inspect(settings: InspectionSettings) -> Inspection:
    """Makes every measurement.

    Raises:
        ExitServeError: the model or the data cannot be read, or states are not finite.
    """
    data = load_inspection_data(settings)
    if settings.prompts and data.task != "next token":
        raise ExitServeError("--prompts is for causal language models, which continue texts.")
    model = model_to_run(settings.model, data.task, getattr(torch, settings.dtype))
    exits = trained_exits(settings.model) or []
    measured = measure_layers(model, data, settings.samples, settings.seed)
    with_last = _with_last(measured)
    report = {
        "kind": "inspection",
        "model": Path(settings.model).name,
        "architecture": type(model).__name__,
        "task": data.task,
        "dtype": settings.dtype,
        "num_layers": measured.num_layers,
        "exit_layers": exits,
        "rows": measured.sequences,
        "said": measured.labelled,
        "samples": len(measured.classes()),
        "seed": settings.seed,
        "layers": _layers(measured, data.task, settings.seed),
        **_similarity(measured, with_last),
        **_condensation(measured),
        "texts": _generated_texts(settings, data, model, [*exits, measured.num_layers]),
        "machine": machine(),
        "versions": versions(),
    }
    accuracies = {int(depth): layer["accuracy"] for depth, layer in report["layers"].items()}
    report["minimal_depth"] = {f"{one:g}": minimal_depth(accuracies, one) for one in SHARES}
    return Inspection(report, _figures(report, with_last))


def _layers(
    measured: LayerMeasurements, task: Task, seed: int
) -> dict[str, dict[str, float | None]]:
    """The measurements that are one number for each depth."""
    labels = measured.classes()
    rows, classes = _frequent(labels)
    half = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
    first, second = half[: len(half) // 2], half[len(half) // 2 :]
    found: dict[str, dict[str, float | None]] = {}
    for depth in range(1, measured.num_layers + 1):
        states = measured.features(depth)
        means = measured.means(depth)
        found[str(depth)] = {
            **means,
            # Of a classifier one state of an input predicts, which has none to be compared with.
            **({"contrastive_similarity": None} if task == "class" else {}),
            "perplexity": math.exp(means["loss"]) if means["loss"] < 700.0 else None,
            "probe_accuracy": None
            if classes < 2
            else linear_probe(states[first], labels[first], states[second], labels[second]),
            "nc1": None if classes < 2 else nc1(states[rows], labels[rows]),
        }
    return found


def _frequent(labels: Tensor) -> tuple[Tensor, int]:
    """Rows whose class is frequent enough to learn from, and how many such classes there are."""
    names, counts = torch.unique(labels, return_counts=True)
    order = counts.argsort(descending=True)[:MOST_CLASSES]
    kept = names[order[counts[order] >= FEWEST_SAMPLES]]
    return torch.isin(labels, kept).nonzero().squeeze(-1), len(kept)


def _similarity(measured: LayerMeasurements, with_last: Mapping[int, Tensor]) -> dict[str, Any]:
    """COS and CKA of all pairs of layers, and the spread of cosines with the last."""
    features = [measured.features(depth) for depth in range(1, measured.num_layers + 1)]
    levels = torch.tensor(QUARTILES, dtype=torch.float64)
    return {
        "cos": cos_matrix(features).tolist(),
        "cka": cka_matrix(features).tolist(),
        "cosine_with_last": {
            str(depth): found.double().quantile(levels).tolist()
            for depth, found in with_last.items()
        },
    }


def _with_last(measured: LayerMeasurements) -> dict[int, Tensor]:
    """Each sampled state's cosine with the last layer's, by depth."""
    last = centred(measured.features(measured.num_layers))
    return {
        depth: cosines(centred(measured.features(depth)), last)
        for depth in range(1, measured.num_layers + 1)
    }


def _condensation(measured: LayerMeasurements) -> dict[str, Any]:
    means = measured.condensation.means()
    rho, tau = trend(means) if len(means) > 1 else (0.0, 0.0)
    found = {
        "mean_cosine": {str(depth): mean for depth, mean in means.items()},
        "spearman": rho,
        "kendall": tau,
        "histograms": measured.condensation.histograms().tolist(),
    }
    return {"condensation": found}


def _generated_texts(
    settings: InspectionSettings, data: InspectionData, model: Any, depths: Sequence[int]
) -> dict[str, Any] | None:
    if not settings.prompts:
        return None
    begun = list(prompts(data, settings.prompts, settings.prompt_tokens))
    if not begun:
        raise ExitServeError(
            f"no text of the data is {settings.prompt_tokens} tokens long; lower --prompt-tokens."
        )
    embed = sentence_embedder(settings.sentence_model) if settings.sentence_model else None
    sampled = {"new_tokens": settings.new_tokens, "seed": settings.seed}
    return generate_texts(model, data.tokenizer, depths, begun, embed=embed, **sampled)


def _figures(report: Mapping[str, Any], with_last: Mapping[int, Tensor]) -> dict[str, Figure]:
    depths = sorted(with_last)
    exits = report["exit_layers"]

    def curve(name: str) -> dict[int, float]:
        layers = report["layers"]
        return {d: layers[str(d)][name] for d in depths if layers[str(d)][name] is not None}

    # A probe is fitted to frequent tokens alone, which are easier than all.
    among = "" if report["task"] == "class" else f", {MOST_CLASSES} most frequent tokens"
    names = {"accuracy": "shared head", "probe_accuracy": f"linear probe{among}"}
    accuracies = {label: found for name, label in names.items() if (found := curve(name))}
    losses = {"shared head": curve("loss")}
    ranks = {"states of a sequence": curve("effective_rank")}
    spread = report["condensation"]
    return {
        "accuracy": plots.by_depth(accuracies, "accuracy", exits),
        "loss": plots.by_depth(losses, "loss (nats)", exits),
        "effective_rank": plots.by_depth(ranks, "effective rank", exits),
        "similarity": plots.heat_map(
            {name.upper(): torch.tensor(report[name]) for name in ("cos", "cka")}, depths
        ),
        "cosine_with_last": plots.box_plot(with_last, "cosine with the last layer"),
        "condensation": plots.stacked_histograms(
            torch.tensor(spread["histograms"]),
            depths,
            means=list(spread["mean_cosine"].values()),
            title=f"Spearman {spread['spearman']:.2f}, Kendall {spread['kendall']:.2f}",
        ),
    }
