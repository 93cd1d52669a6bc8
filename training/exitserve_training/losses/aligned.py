"""The aligned loss: one classifier, trained to read every exit layer.

Paper: aligned training, section 3, eq. 3:

    L_aligned(x, y) = sum over l = 1..L of lambda_l * CE(W h^l, y),  lambda_l = 2l / (L(L+1))

W is what the last layer uses: the final norm and the LM head, shared by all layers. Shallow
layers are so drawn towards the features of the deep ones, and no head is added to the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from exitserve.errors import ExitServeError
from exitserve_training.layer_weights import counted_layers, layer_weights
from exitserve_training.losses.head import Classifier, OutputHead, Reading
from exitserve_training.losses.head_losses import CHUNK_TOKENS, head_losses
from exitserve_training.losses.tokens import IGNORED


def aligned_cross_entropy(
    hidden_states: Sequence[Tensor | None],
    head: OutputHead,
    labels: Tensor,
    *,
    exit_layers: Sequence[int] | None = None,
    weights: str | Sequence[float] = "linear",
    mask: Tensor | None = None,
) -> Tensor:
    """Returns the weighted mean cross-entropy of all counted layers (scalar, nats per token).

    Args:
        hidden_states: L tensors [B, T, D], the un-normed residual stream after layers 1..L.
            Entries of layers that do not count may be None.
        head: final norm and LM head, shared by all layers.
        labels: targets [B, T], already shifted; -100 is ignored.
        exit_layers: depths in 1..L that count besides L; None for every layer.
        weights: `"linear"` (eq. 3; over a subset renormalised to sum to 1), `"uniform"`, or one
            number per counted layer, ascending, used as given.
        mask: bool [B, T]; tokens where it is False are ignored.

    Raises:
        ExitServeError: a layer is out of range or missing, the weights do not fit, or shapes
            disagree.
    """
    if not hidden_states:
        raise ExitServeError("hidden_states is empty; give one tensor per layer.")
    layers = counted_layers(len(hidden_states), exit_layers)
    scale = layer_weights(layers, weights)
    given = {layer: hidden_states[layer - 1] for layer in layers}
    missing = [layer for layer, hidden in given.items() if hidden is None]
    if missing:
        raise ExitServeError(f"hidden_states has no tensor for layers {missing}, which count.")
    hidden = {layer: tensor for layer, tensor in given.items() if tensor is not None}
    of_layer = dict(zip(layers, scale, strict=True))
    return weighted_layer_cross_entropy(hidden, head, labels, of_layer, mask=mask)[0]


def weighted_layer_cross_entropy(
    hidden: Mapping[int, Tensor],
    head: OutputHead,
    labels: Tensor,
    scale: Mapping[int, float],
    *,
    mask: Tensor | None = None,
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
        scale: layer to the weight of its mean, for every layer of `hidden`; others are ignored.
        mask: bool [B, T]; tokens where it is False are ignored at every layer.
        masks: layer to bool [B, T], for every layer of `hidden`: tokens where it is False are
            ignored at this layer.

    Raises:
        ExitServeError: no layer is given, one has no scale or no mask in `masks`, or the shapes
            of hidden states, labels and masks disagree.
    """
    if not hidden:
        raise ExitServeError("hidden is empty; give the hidden states of one layer at least.")
    _check_layers("scale", hidden, scale)
    if masks is not None:
        _check_layers("masks", hidden, masks)
    counted = _counted_tokens(labels, mask)
    shared = _tokens_at(counted, labels)
    tokens = max(len(shared[1]), 1)
    readings: list[Reading] = []
    for layer, states in hidden.items():
        _check_states(layer, states, labels)
        rows, targets = shared
        if masks is not None:
            _check_mask(f"mask of layer {layer}", masks[layer], labels)
            rows, targets = _tokens_at(counted & masks[layer].reshape(-1).bool(), labels)
        weight = torch.full_like(targets, scale[layer] / tokens, dtype=torch.float32)
        readings.append(Reading(states.reshape(-1, states.shape[-1]), targets, weight, rows=rows))
    total, found = head_losses(readings, head)
    losses = [one.cross_entropy for one in found if one.cross_entropy is not None]
    means = [loss.sum() / max(len(loss), 1) for loss in losses]
    return total, dict(zip(hidden, means, strict=True))


@torch.no_grad()
def layer_quality(hidden: Tensor, classifier: Classifier, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean cross-entropy (nats) and accuracy over the counted tokens; no gradient.

    Accuracy is the share whose most likely token is the label (aligned-training paper, eq. 4).
    With no counted token both are 0.

    Args:
        hidden: un-normed hidden states [B, T, D].
        classifier: maps [N, D] to [N, V].
        labels: targets [B, T], already shifted; -100 is ignored.

    Raises:
        ExitServeError: the shapes of hidden states and labels disagree.
    """
    _check_states("read", hidden, labels)
    rows, targets = _tokens_at(_counted_tokens(labels, None), labels)
    flat = hidden.reshape(-1, hidden.shape[-1])
    flat = flat if rows is None else flat[rows]
    nats = torch.zeros((), device=hidden.device)
    right = torch.zeros((), device=hidden.device)
    for start in range(0, len(targets), CHUNK_TOKENS):
        target = targets[start : start + CHUNK_TOKENS]
        logits = classifier(flat[start : start + CHUNK_TOKENS]).float()
        nats += functional.cross_entropy(logits, target, reduction="sum")
        right += (logits.argmax(-1) == target).sum()
    tokens = max(len(targets), 1)
    return nats / tokens, right / tokens


def _counted_tokens(labels: Tensor, mask: Tensor | None) -> Tensor:
    """Bool [B*T]: which tokens have a target."""
    counted = labels != IGNORED
    if mask is not None:
        _check_mask("mask", mask, labels)
        counted = counted & mask.bool()
    return counted.reshape(-1)


def _tokens_at(counted: Tensor, labels: Tensor) -> tuple[Tensor | None, Tensor]:
    """Indices of the tokens that count [M] (None: all), and their targets [M]."""
    targets = labels.reshape(-1)
    if bool(counted.all()):
        return None, targets
    rows = counted.nonzero().squeeze(-1)
    return rows, targets[rows]


def _check_layers(name: str, hidden: Mapping[int, Tensor], given: Mapping[int, object]) -> None:
    missing = [layer for layer in hidden if layer not in given]
    if missing:
        raise ExitServeError(
            f"{name} has no entry for layers {missing}, whose hidden states are given; it has "
            f"{sorted(given)}, and one is needed for each of {sorted(hidden)}."
        )


def _check_mask(name: str, mask: Tensor, labels: Tensor) -> None:
    if mask.shape != labels.shape:
        raise ExitServeError(
            f"{name} has shape {tuple(mask.shape)}, labels {tuple(labels.shape)}; "
            f"they must be equal."
        )


def _check_states(layer: int | str, states: Tensor, labels: Tensor) -> None:
    if states.shape[:2] != labels.shape:
        raise ExitServeError(
            f"hidden states of layer {layer} have shape {tuple(states.shape)}, which does not "
            f"fit labels of shape {tuple(labels.shape)}; expected [B, T, D] and [B, T]."
        )
