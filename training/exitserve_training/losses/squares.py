"""Squared error at several layers, where what is predicted is a number (STS-B)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from exitserve.errors import ExitServeError
from exitserve_training.losses.head import Classifier


def weighted_layer_squares(
    hidden: Mapping[int, Tensor],
    classifier: Classifier,
    labels: Tensor,
    scale: Mapping[int, float],
) -> tuple[Tensor, dict[int, Tensor]]:
    """Returns the weighted sum of the layers' mean squared errors, and each of them, detached.

    What `weighted_layer_cross_entropy` is for classes.

    Args:
        hidden: layer to un-normed states [B, 1, D] of the positions that predict.
        classifier: maps [B, D] to [B, 1]: the norm or pooler, then the head.
        labels: numbers [B, 1].
        scale: layer to the weight of its mean.

    Raises:
        ExitServeError: the head has more outputs than one.
    """
    parts: list[Tensor] = []
    means: dict[int, Tensor] = {}
    for layer, states in hidden.items():
        predicted = classifier(states.reshape(-1, states.shape[-1])).float()
        if predicted.shape[-1] != 1:
            raise ExitServeError(
                f"the head has {predicted.shape[-1]} outputs, and a number needs one; train with "
                f"data.labels=numbers."
            )
        mean = functional.mse_loss(predicted, labels.reshape(-1, 1).float())
        parts.append(scale[layer] * mean)
        means[layer] = mean.detach()
    return torch.stack(parts).sum(), means
