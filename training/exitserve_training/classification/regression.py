"""`exitserve classify` for a regression: how well each depth orders and predicts numbers (STS-B).

A number has no confidence, so no input stops early: every depth reads every input.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import pearsonr, spearmanr
from tqdm import tqdm

from exitserve.decoder import capture_hidden
from exitserve.report import machine, machine_line, markdown_table, versions
from exitserve_training.classification.evaluation import (
    ClassificationResult,
    ClassificationSettings,
    exit_layers,
    load_classifier,
    own_classifiers,
    read_inputs,
)
from exitserve_training.classification.inputs import batch_rows, encoder
from exitserve_training.classification.labelled import Examples, label_numbers
from exitserve_training.models import check_model
from exitserve_training.parts import model_parts

Numbers = NDArray[np.float64]

HEADERS = ("depth", "Pearson", "Spearman", "mean squared error")


def regress(settings: ClassificationSettings) -> ClassificationResult:
    """Predicts a number for each input at every exit layer and the last; no thresholds are used.

    Raises:
        ExitServeError: the data cannot be read.
    """
    config = check_model(settings.model, "class")
    layers = [*exit_layers(settings, config.num_hidden_layers), config.num_hidden_layers]
    examples = read_inputs(settings, config)
    found = _predicted(settings, examples, layers)
    known = np.asarray(label_numbers(examples)) if any(examples.classes) else None
    report = {
        "kind": "regression",
        "model": Path(settings.model).name,
        "architecture": (config.architectures or ["?"])[0],
        "num_layers": config.num_hidden_layers,
        "exit_layers": layers[:-1],
        "inputs": len(examples),
        "layers": {str(layer): number_scores(found[layer], known) for layer in layers},
        "machine": machine(),
        "versions": versions(),
    }
    rows = [
        {"input": given[0] if isinstance(given, tuple) else str(given), "number": round(value, 4)}
        for given, value in zip(examples.inputs, found[layers[-1]].tolist(), strict=True)
    ]
    return ClassificationResult(report, rows)


def number_scores(predicted: Numbers, known: Numbers | None) -> dict[str, float | None]:
    """Pearson's and Spearman's correlations, as GLUE scores STS-B, and the mean squared error.

    A correlation is None where either side is the same everywhere, and all are where `known` is.
    """
    if known is None:
        return dict.fromkeys(("pearson", "spearman", "squared_error"))
    varies = len(known) > 1 and np.ptp(known) > 0.0 and np.ptp(predicted) > 0.0
    return {
        "pearson": float(pearsonr(predicted, known).statistic) if varies else None,
        "spearman": float(spearmanr(predicted, known).statistic) if varies else None,
        "squared_error": float(np.mean((predicted - known) ** 2)),
    }


def rows(report: dict[str, Any]) -> list[list[str]]:
    """A line for each depth."""
    return [
        [
            f"{depth} of {report['num_layers']}",
            *["-" if value is None else f"{value:.4f}" for value in found.values()],
        ]
        for depth, found in report["layers"].items()
    ]


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    return "\n".join(
        [
            f"# Numbers predicted at each depth: {report['model']}",
            "",
            f"{report['architecture']}, {report['num_layers']} layers. "
            f"{report['inputs']:,} inputs.",
            "",
            markdown_table(HEADERS, rows(report)),
            "",
            machine_line(report),
            "",
        ]
    )


def _predicted(
    settings: ClassificationSettings, examples: Examples, layers: Sequence[int]
) -> dict[int, Numbers]:
    """Depth to the number of each input, in the order of the inputs."""
    model = load_classifier(settings.model)
    parts = model_parts(model)
    own, encode = own_classifiers(settings.model, parts), encoder(settings.model, model.config)
    found = {layer: np.zeros(len(examples)) for layer in layers}
    for batch in tqdm(batch_rows(examples, settings.batch_size), desc="predicting", disable=None):
        inputs = {key: value.to(model.device) for key, value in encode(examples.at(batch)).items()}
        with torch.no_grad(), capture_hidden(parts.layers, layers) as hidden:
            parts.body(**inputs)
            for layer in layers:
                head = own.get(layer, parts.head)
                predicted = head(parts.predicting(hidden[layer])[:, 0]).float()
                found[layer][batch] = predicted[:, 0].cpu().numpy()
    return found
