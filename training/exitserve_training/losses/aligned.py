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

from exitserve.errors import ExitServeError
from exitserve_training.losses.chunked import IGNORED, Classifier, chunked_cross_entropy
from exitserve_training.losses.weights import counted_layers, layer_weights


def aligned_cross_entropy(
    hidden_states: Sequence[Tensor | None],
    classifier: Classifier,
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
        classifier: maps [N, D] to [N, V]: final norm, then LM head. Called on chunks of tokens
            and once more in backward, so it must be deterministic.
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
    losses = layer_cross_entropy(hidden, classifier, labels, mask=mask)
    weighted = [weight * losses[layer] for layer, weight in zip(layers, scale, strict=True)]
    return torch.stack(weighted).sum()


def layer_cross_entropy(
    hidden: Mapping[int, Tensor],
    classifier: Classifier,
    labels: Tensor,
    *,
    mask: Tensor | None = None,
) -> dict[int, Tensor]:
    """Returns each layer's mean cross-entropy over the counted tokens (scalars, nats per token).

    With no counted token at all the loss is 0 with zero gradients, not NaN.

    Args:
        hidden: layer to un-normed hidden states [B, T, D].
        classifier: maps [N, D] to [N, V].
        labels: targets [B, T], already shifted; -100 is ignored.
        mask: bool [B, T]; tokens where it is False are ignored.

    Raises:
        ExitServeError: the shapes of hidden states, labels and mask disagree.
    """
    counted = _counted_tokens(labels, mask)
    targets = labels.reshape(-1)
    everything = bool(counted.all())
    if not everything:
        targets = targets[counted]
    # With nothing to average the sum is 0, and so must the mean be.
    tokens = max(targets.numel(), 1)
    losses: dict[int, Tensor] = {}
    for layer, states in hidden.items():
        if states.shape[:2] != labels.shape:
            raise ExitServeError(
                f"hidden states of layer {layer} have shape {tuple(states.shape)}, which does not "
                f"fit labels of shape {tuple(labels.shape)}; expected [B, T, D] and [B, T]."
            )
        flat = states.reshape(-1, states.shape[-1])
        # Dropped before the head, ignored tokens cost nothing.
        flat = flat if everything else flat[counted]
        loss = chunked_cross_entropy(flat, classifier, targets) / tokens
        losses[layer] = loss if targets.numel() else loss + states.sum() * 0.0
    return losses


def _counted_tokens(labels: Tensor, mask: Tensor | None) -> Tensor:
    """Bool [B*T]: which tokens have a target."""
    counted = labels != IGNORED
    if mask is not None:
        if mask.shape != labels.shape:
            raise ExitServeError(
                f"mask has shape {tuple(mask.shape)}, labels {tuple(labels.shape)}; "
                f"they must be equal."
            )
        counted = counted & mask.bool()
    return counted.reshape(-1)
