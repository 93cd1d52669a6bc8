"""What studies keep of a trained checkpoint: small numbers, by depth."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exitserve_training.classification import run as classification
from exitserve_training.inspect.run import Settings, inspect

Measured = dict[str, Any]


def quality(folder: Path) -> Measured:
    """Held-out loss and accuracy by depth, as the training report has them."""
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    kept = {
        depth: {"loss": round(layer["loss"], 5), "accuracy": round(layer["accuracy"], 5)}
        for depth, layer in report["layers"].items()
    }
    return {"layers": kept, "training_seconds": report["seconds"]}


def look(
    folder: Path, data: Sequence[str], fields: Mapping[str, Any] | None = None, rows: int = 100
) -> Measured:
    """The instruments of `exitserve inspect`, without the matrices' inner parts."""
    settings = Settings(
        str(folder), list(data), fields or {}, rows=rows, samples=2000, length=128, batch_size=16
    )
    report = inspect(settings).report
    last = report["num_layers"] - 1
    by_depth = {
        depth: {
            "cos": round(report["cos"][number][last], 4),
            "cka": round(report["cka"][number][last], 4),
            "probe": layer["probe_accuracy"] and round(layer["probe_accuracy"], 4),
            "nc1": layer["nc1"] and round(layer["nc1"], 4),
            "effective_rank": round(layer["effective_rank"], 3),
            "mean_cosine": round(report["condensation"]["mean_cosine"][depth], 4),
        }
        for number, (depth, layer) in enumerate(report["layers"].items())
    }
    trend = {name: round(report["condensation"][name], 4) for name in ("spearman", "kendall")}
    return {"inspected": by_depth, **trend}


def exits(
    folder: Path, data: Sequence[str], fields: Mapping[str, Any], thresholds: Sequence[float]
) -> Measured:
    """A classifier with early exit at some thresholds."""
    settings = classification.Settings(
        str(folder), list(data), list(thresholds), batch_size=64, repeats=1, fields=fields
    )
    report = classification.classify(settings).report
    kept = {
        f"{way['threshold']:g}": {
            "accuracy": round(way["accuracy"], 5),
            "depth_speedup": round(way["depth_speedup"], 4),
            "wall_speedup": round(way["wall_speedup"], 3),
            "exits": way["exits"],
        }
        for way in report["thresholds"]
    }
    return {"exits": kept, "full_accuracy": round(report["full_accuracy"], 5)}
