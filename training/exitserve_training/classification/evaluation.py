"""A classifier over a file, with early exit beside the full model.

Both run the same batches in one process, in turn; times are ratios within a round, so that a
noisy machine hits both.
"""

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from sklearn import metrics
from torch import Tensor
from transformers import PreTrainedModel

from exitserve.reporting.progress import counted
from exitserve.reporting.report import machine, versions
from exitserve_training.checkpoints import OBJECTIVES_FILE
from exitserve_training.classification.early_exit import ClassPredictions, EarlyExitClassifier
from exitserve_training.classification.inputs import batch_rows, data_format, encoder
from exitserve_training.classification.labelled import Examples, class_numbers, read_examples
from exitserve_training.data_recipe import data_from
from exitserve_training.losses.head import Classifier
from exitserve_training.models import check_model, known_classes, model_to_run, trained_exits
from exitserve_training.objectives.aligned.options import SeparateClassifiersOptions
from exitserve_training.objectives.options import BuildContext
from exitserve_training.parts import ModelParts, model_parts

Inputs = dict[str, Tensor]
Scores = dict[str, float | None]
"""What GLUE scores classifiers by: accuracy, F1 (MRPC, QQP) and Matthews (CoLA)."""


@dataclass(frozen=True)
class ClassificationSettings:
    """The options of the command line."""

    model: str
    data: list[str]
    thresholds: list[float]
    batch_size: int = 32
    repeats: int = 3
    exit_layers: list[int] | None = None
    """None: those of the checkpoint."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """`text_field` and the like, as a recipe's `data` has them."""


@dataclass(frozen=True)
class ClassificationResult:
    """The report, and the predictions at the first threshold."""

    report: dict[str, Any]
    predictions: list[dict[str, Any]]

    def write_predictions(self, path: Path) -> None:
        """One JSON object a line, in the order of the inputs."""
        lines = [json.dumps(row, ensure_ascii=False) for row in self.predictions]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def classify(settings: ClassificationSettings) -> ClassificationResult:
    """Runs the classifier at every threshold and at full depth.

    Raises:
        ExitServeError: the model is not a classifier, or the data cannot be read.
    """
    config = check_model(settings.model, "class")
    known = settings.exit_layers or trained_exits(settings.model)
    # A checkpoint that was not trained for exits may still be looked at: everywhere.
    layers = list(range(1, config.num_hidden_layers)) if known is None else known
    recipe = data_from({"format": data_format(config), "files": settings.data, **settings.fields})
    examples = read_examples(recipe, recipe.files, recipe.dataset_split, needs_classes=False)
    model = model_to_run(settings.model, "class")
    own = _own_classifiers(settings.model, model_parts(model))
    runner = EarlyExitClassifier(model, layers, own)
    order = batch_rows(examples, settings.batch_size)
    encode = encoder(settings.model, config, recipe)
    inputs = (encode(examples.at(rows)) for rows in counted(order, "classifying"))
    parts_of, seconds = _rounds(runner, model, inputs, settings)
    names = known_classes(config)
    # Of batches, put into the order of the inputs.
    back = torch.argsort(torch.tensor([row for batch in order for row in batch]))
    predictions = {
        threshold: ClassPredictions(*(torch.cat(part)[back] for part in zip(*parts, strict=True)))
        for threshold, parts in parts_of.items()
    }
    report = _report(settings, config, layers, examples, names, predictions, seconds)
    return ClassificationResult(
        report, _predictions(examples, names, predictions[settings.thresholds[0]])
    )


def _own_classifiers(folder: str, parts: ModelParts) -> Mapping[int, Classifier]:
    """The classifiers of exits that were trained with one each (`separate_classifiers`).

    They lie beside the checkpoint, and only this command can use them.
    """
    file = Path(folder) / OBJECTIVES_FILE
    marker = f"{SeparateClassifiersOptions().name}."
    tensors = load_file(file) if file.is_file() else {}
    found = {name.split(marker)[1]: t for name, t in tensors.items() if marker in name}
    if not found:
        return {}
    layers = sorted({int(name.split(".")[1]) for name in found})
    hidden_size = next(iter(found.values())).shape[-1]
    context = BuildContext(layers, parts.num_layers, hidden_size, parts.head, seed=0)
    objective = SeparateClassifiersOptions().build(context)
    objective.load_state_dict(found)
    objective.to(next(parts.layers.parameters()).device)
    objective.train(False)
    return objective.classifiers()


def _rounds(
    runner: EarlyExitClassifier,
    model: PreTrainedModel,
    inputs: Iterable[Inputs],
    settings: ClassificationSettings,
) -> tuple[dict[float, list[ClassPredictions]], dict[float | None, list[float]]]:
    """Runs every batch by the model's own forward and at each threshold, in turn.

    Returns the predictions by threshold (1.0 is full depth) and the seconds of each round, None for
    the model's own forward. The first round warms up and gives the predictions. A batch has all
    its rounds before the next is read, so that one batch is in memory.
    """
    thresholds = dict.fromkeys([*settings.thresholds, 1.0])
    ways: dict[float | None, Callable[[Inputs], Any]] = {None: lambda batch: model(**batch)}
    ways |= {threshold: partial(runner, threshold=threshold) for threshold in thresholds}
    predictions: dict[float, list[ClassPredictions]] = {threshold: [] for threshold in thresholds}
    seconds: dict[float | None, list[float]] = {way: [0.0] * (settings.repeats + 1) for way in ways}
    for given in inputs:
        batch = {name: tensor.to(model.device) for name, tensor in given.items()}
        for number, (threshold, way) in product(range(settings.repeats + 1), ways.items()):
            start = _now(model.device)
            with torch.inference_mode():
                found = way(batch)
            seconds[threshold][number] += _now(model.device) - start
            if number == 0 and threshold is not None:
                predictions[threshold].append(ClassPredictions(*(one.cpu() for one in found)))
    return predictions, {way: times[1:] for way, times in seconds.items()}


def _now(device: torch.device) -> float:
    """The time, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _report(
    settings: ClassificationSettings,
    config: Any,
    layers: Sequence[int],
    examples: Examples,
    names: Sequence[str],
    predictions: Mapping[float, ClassPredictions],
    seconds: Mapping[float | None, Sequence[float]],
) -> dict[str, Any]:
    full = predictions[1.0]
    known = torch.tensor(class_numbers(examples, names)) if any(examples.classes) else None
    num_layers = config.num_hidden_layers
    results = []
    for threshold in settings.thresholds:
        found = predictions[threshold]
        depth, counts = found.depth.double(), Counter(found.depth.tolist())
        ratios = [a / b for a, b in zip(seconds[None], seconds[threshold], strict=True)]
        results.append(
            {
                "threshold": threshold,
                "exits": {str(layer): counts[layer] for layer in (*layers, num_layers)},
                "mean_depth": float(depth.mean()),
                # The paper's formula: sum of L m_i over sum of i m_i.
                "depth_speedup": num_layers * len(depth) / float(depth.sum()),
                "wall_speedup": statistics.median(ratios),
                "wall_speedup_range": [min(ratios), max(ratios)],
                "agreement": float((found.classes == full.classes).double().mean()),
                **_scores(found, known, len(names)),
            }
        )
    return {
        "kind": "classification",
        "model": Path(settings.model).name,
        "architecture": (config.architectures or ["?"])[0],
        "num_layers": num_layers,
        "exit_layers": list(layers),
        "inputs": len(examples),
        "batch_size": settings.batch_size,
        "repeats": settings.repeats,
        "threads": torch.get_num_threads(),
        "full_seconds": statistics.median(seconds[None]),
        **{f"full_{key}": value for key, value in _scores(full, known, len(names)).items()},
        "thresholds": results,
        "machine": machine(),
        "versions": versions(),
    }


def _scores(predictions: ClassPredictions, known: Tensor | None, num_classes: int) -> Scores:
    """F1 is that of the second of two classes; with more there is none."""
    if known is None:
        return dict.fromkeys(("accuracy", "f1", "matthews"))
    pair = known.numpy(), predictions.classes.numpy()
    return {
        "accuracy": float(metrics.accuracy_score(*pair)),
        "matthews": float(metrics.matthews_corrcoef(*pair)),
        "f1": float(metrics.f1_score(*pair, zero_division=0.0)) if num_classes == 2 else None,
    }


def _predictions(
    examples: Examples, names: Sequence[str], predictions: ClassPredictions
) -> list[dict[str, Any]]:
    rows = zip(examples.inputs, *(column.tolist() for column in predictions), strict=True)
    return [
        {
            "input": given[0] if isinstance(given, tuple) else str(given),
            "class": names[found],
            "confidence": round(sure, 4),
            "depth": depth,
        }
        for given, found, sure, depth in rows
    ]
