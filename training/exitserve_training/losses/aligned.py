"""The aligned loss: one classifier, trained to read every exit layer.

Paper: aligned training, section 3, eq. 3:

    L_aligned(x, y) = sum over l = 1..L of lambda_l * CE(W h^l, y),  lambda_l = 2l / (L(L+1))

W is what the last layer uses: the final norm and the LM head, shared by all layers. Shallow
layers are so drawn towards the features of the deep ones, and no head is added to the model.
`layer_weights` has the lambdas.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from exitserve_training.losses.head import Classifier, OutputHead, Reading
from exitserve_training.losses.head_losses import CHUNK_TOKENS, head_losses
from exitserve_training.losses.tokens import IGNORED


def aligned_cross_entropy(
    hidden: Mapping[int, Tensor],
    head: OutputHead,
    labels: Tensor,
    scale: Mapping[int, float],
    *,
    masks: Mapping[int, Tensor] | None = None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Returns the weighted sum of the layers' cross-entropies, and each mean (nats per token).

    The sum is a differentiable scalar, the means are detached. The means are over each layer's
    own counted tokens. In the sum every layer is divided by the tokens that count without
    `masks`: a token weighs the same whatever others do, so that the sum does not depend on how a
    batch is split. A layer without any token contributes 0, with zero gradients.

    Args:
        hidden: layer to un-normed hidden states [B, T, D].
        head: final norm and LM head.
        labels: targets [B, T], already shifted; -100 is ignored.
        scale: layer to the weight of its mean, for every layer of `hidden`.
        masks: layer to bool [B, T], for every layer of `hidden`: tokens where it is False are
            ignored at this layer.
    """
    counted = labels != IGNORED
    shared = tokens_at(counted, labels)
    tokens = max(len(shared[1]), 1)
    readings: list[Reading] = []
    for layer, states in hidden.items():
        rows, targets = shared
        if masks is not None:
            rows, targets = tokens_at(counted & masks[layer].bool(), labels)
        weight = torch.full_like(targets, scale[layer] / tokens, dtype=torch.float32)
        readings.append(Reading(states.flatten(0, 1), targets, weight, rows=rows))
    total, found = head_losses(readings, head)
    losses = [one.cross_entropy for one in found if one.cross_entropy is not None]
    means = [loss.sum() / max(len(loss), 1) for loss in losses]
    return total, dict(zip(hidden, means, strict=True))


class Predictions(NamedTuple):
    """What a depth says of each counted token, all [M]."""

    nats: Tensor
    """The label's cross-entropy."""
    right: Tensor
    """Bool: whether the most likely token is the label."""
    token: Tensor
    """The most likely token."""
    confidence: Tensor
    """Its probability."""
    margin: Tensor
    """The label's logit less the greatest of all others (SimReg paper, section 4)."""


@torch.no_grad()
def predictions(hidden: Tensor, classifier: Classifier, labels: Tensor) -> Predictions:
    """What a depth says of each counted token; no gradient.

    Args:
        hidden: un-normed hidden states [B, T, D].
        classifier: maps [N, D] to [N, V].
        labels: targets [B, T], already shifted; -100 is ignored.
    """
    rows, targets = tokens_at(labels != IGNORED, labels)
    flat = hidden.flatten(0, 1)
    flat = flat if rows is None else flat[rows]
    found = []
    # One chunk at least, which may be empty.
    for start in range(0, max(len(targets), 1), CHUNK_TOKENS):
        target = targets[start : start + CHUNK_TOKENS]
        logits = classifier(flat[start : start + CHUNK_TOKENS]).float()
        most, token = logits.max(-1)
        nats = functional.cross_entropy(logits, target, reduction="none")
        confidence = (most - logits.logsumexp(-1)).exp()
        own = logits.gather(-1, target[:, None])
        margin = own[:, 0] - logits.scatter_(-1, target[:, None], -torch.inf).amax(-1)
        found.append((nats, token == target, token, confidence, margin))
    return Predictions(*map(torch.cat, zip(*found, strict=True)))


def tokens_at(counted: Tensor, labels: Tensor) -> tuple[Tensor | None, Tensor]:
    """Indices of the tokens that count [M], ascending (None: all), and their targets [M]."""
    targets, rows = labels.reshape(-1), counted.reshape(-1).nonzero().squeeze(-1)
    return (None, targets) if len(rows) == len(targets) else (rows, targets[rows])
