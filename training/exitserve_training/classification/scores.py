"""What GLUE scores classifiers by: accuracy, F1 (MRPC, QQP) and Matthews (CoLA)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Scores = dict[str, float | None]


def scores(predicted: Tensor, known: Tensor, num_classes: int) -> Scores:
    """Accuracy, F1 of the second of two classes, and Matthews' correlation.

    F1 is None with more classes than two. Either is 0 where its denominator is, as in
    scikit-learn.

    Args:
        predicted: class numbers [N].
        known: the right ones [N].
        num_classes: K.
    """
    pairs = known * num_classes + predicted
    counts = torch.bincount(pairs, minlength=num_classes**2).double()
    table = counts.reshape(num_classes, num_classes)
    right, total = float(table.trace()), float(table.sum())
    found: Scores = {"accuracy": right / total, "matthews": _matthews(table), "f1": None}
    if num_classes == 2:
        both = float(table[1].sum() + table[:, 1].sum())
        found["f1"] = 2.0 * float(table[1, 1]) / both if both else 0.0
    return found


def _matthews(table: Tensor) -> float:
    """Of counts [known, predicted]: R_K of Gorodkin (2004), phi of two classes."""
    known, predicted = table.sum(1), table.sum(0)
    total = float(table.sum())
    covariance = float(table.trace()) * total - float(known @ predicted)
    spread = (total**2 - float(predicted @ predicted)) * (total**2 - float(known @ known))
    return covariance / math.sqrt(spread) if spread > 0.0 else 0.0
