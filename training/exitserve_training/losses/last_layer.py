"""Alignment of shallow layers with the last: of directions, or of predictions.

These are the two alternatives to the aligned loss that its paper names (aligned training). Both
sum over layers with the weights lambda_l of `layer_weights`, and average over tokens:

    L_sim = sum over l = 1..L of lambda_l * (1 - cos(h^l, h^L))          appendix C
    L_KL  = sum over l = 1..L of lambda_l * T^2 * KL(p^L || p^l)         section 3, in words

h^l is the residual stream after layer l, p^l = softmax(W h^l / T). The term l = L is 0 in both
and is not computed; it keeps its share of the weights, as in the paper's sum over 1..L.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from exitserve.errors import ExitServeError
from exitserve_training.layer_weights import counted_layers, layer_weights
from exitserve_training.losses.head import OutputHead, Reading, Teacher
from exitserve_training.losses.head_losses import head_losses
from exitserve_training.losses.tokens import (
    Reduction,
    at_least_float32,
    check_reduction,
    unit_vectors,
)


def cosine_alignment(
    hidden_states: Sequence[Tensor | None],
    *,
    exit_layers: Sequence[int] | None = None,
    weights: str | Sequence[float] = "linear",
    detach_last: bool = False,
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Returns L_sim: how far the layers' states point away from the last layer's (0 to 2).

    The paper adds it to the last layer's cross-entropy, times a coefficient beta (L_CE-reg); it
    finds that this helps far less than the aligned loss (figure 13). Choices the text leaves
    open: gradients reach h^L too, since the formula shows no stop-gradient (`detach_last` stops
    them); the states are not centred, since centring (footnote 1) belongs to a measurement over
    a data set and would here tie the tokens of a batch to each other; lambda_l is eq. 3's.

    A vector whose largest entry is below the smallest normal number of its dtype has no
    direction: its cosine counts as 0, without gradient. All others give finite gradients.

    Args:
        hidden_states: L tensors [B, T, D], the un-normed residual stream after layers 1..L.
            Entries of layers that do not count may be None. Computed in at least float32, one
            layer at a time; backward computes the layer again instead of keeping copies.
        exit_layers: depths in 1..L that count besides L; None for every layer.
        weights: `"linear"`, `"uniform"`, or one number per counted layer, ascending, L included.
        detach_last: whether the last layer is a fixed target.
        mask: bool [B, T], the tokens that count; None for all.
        reduction: `"mean"` over the counted tokens (float32 scalar, 0 where none counts), or
            `"none"`: float32 [B, T], 0 where a token does not count.

    Raises:
        ExitServeError: a layer is out of range or missing, the weights do not fit, shapes
            disagree, or `reduction` is unknown.
    """
    check_reduction(reduction)
    inner, last = _weighted_layers(hidden_states, exit_layers, weights)
    counted = _counted_tokens(last, mask)
    # A sum over no features: zeros [N] that still hang on the graph if no other layer counts.
    total = at_least_float32(_rows(last[..., :0], counted)).sum(-1)
    target = last.detach() if detach_last else last
    for weight, states in inner:
        distance: Tensor = checkpoint(
            _one_minus_cosine,
            states,
            target,
            counted,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        total = total + weight * distance
    if reduction == "mean":
        return total.sum() / max(total.numel(), 1)
    if counted is None:
        return total.reshape(last.shape[:2])
    return total.new_zeros(counted.shape).masked_scatter(counted, total).reshape(last.shape[:2])


def kl_to_last(
    hidden_states: Sequence[Tensor | None],
    head: OutputHead,
    *,
    exit_layers: Sequence[int] | None = None,
    weights: str | Sequence[float] = "linear",
    temperature: float = 1.0,
    teacher: OutputHead | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Returns L_KL: the divergence of the layers' predictions from the last layer's (nats).

    Self-distillation as multi-exit training uses it (section 3 names it as what the aligned loss
    does without). The last layer teaches: p^L is detached, so neither h^L nor the head learns from
    that side; the head does learn as the reader of the shallow layers. The divergence is
    KL(p^L || p^l), the mean over p^L of log p^L - log p^l. The factor T^2 keeps the gradients' size
    as T grows, for they shrink by 1/T^2.

    Args:
        hidden_states: L tensors [B, T, D], the un-normed residual stream after layers 1..L.
            Entries of layers that do not count may be None.
        head: final norm and LM head, shared by all layers.
        exit_layers: depths in 1..L that count besides L; None for every layer.
        weights: `"linear"`, `"uniform"`, or one number per counted layer, ascending, L included
            (whose number has no effect, as its divergence is 0).
        temperature: T > 0, dividing the logits of both sides.
        teacher: what reads the last layer, where `head` is the layers' own (the multi-exit models
            with a classifier per exit, or a teacher that is another model, whose states may have
            another width); None for the shared one.
        mask: bool [B, T], the tokens that count; None for all. The loss is a mean over them, and
            0 where none counts.

    Raises:
        ExitServeError: a layer is out of range or missing, the weights do not fit, shapes
            disagree, or the temperature is not positive.
    """
    if not (temperature > 0.0 and math.isfinite(temperature)):
        raise ExitServeError(f"temperature {temperature} must be a positive number, such as 1.0.")
    inner, last = _weighted_layers(hidden_states, exit_layers, weights, width=teacher is None)
    counted = _counted_tokens(last, mask)
    # The sum over no entries is 0 and hangs on the graph, whatever the entries are.
    nothing = at_least_float32(last.reshape(-1)[:0]).sum()
    if not inner:
        return nothing
    rows = None if counted is None else counted.nonzero().squeeze(-1)
    tokens = last.shape[0] * last.shape[1] if rows is None else len(rows)
    readings = []
    for weight, states in inner:
        each = torch.full((tokens,), weight * temperature**2 / max(tokens, 1), device=last.device)
        readings.append(Reading(states.flatten(0, 1), divergence=each, rows=rows))
    taught_by = Teacher(last.detach().flatten(0, 1), teacher or head, temperature)
    return nothing + head_losses(readings, head, taught_by)[0]


def _one_minus_cosine(states: Tensor, target: Tensor, counted: Tensor | None) -> Tensor:
    """[N], one number per counted token."""
    own, other = _rows(states, counted), _rows(target, counted)
    return 1.0 - (_direction(own) * _direction(other)).sum(-1)


def _direction(rows: Tensor) -> Tensor:
    return unit_vectors(at_least_float32(rows), torch.finfo(rows.dtype).tiny)


def _weighted_layers(
    hidden_states: Sequence[Tensor | None],
    exit_layers: Sequence[int] | None,
    weights: str | Sequence[float],
    width: bool = True,
) -> tuple[list[tuple[float, Tensor]], Tensor]:
    """The counted layers below L with their weights, and the last layer's states.

    With `width` all have to be of the last layer's D.
    """
    if not hidden_states:
        raise ExitServeError("hidden_states is empty; give one tensor per layer.")
    layers = counted_layers(len(hidden_states), exit_layers)
    scale = layer_weights(layers, weights)
    last = hidden_states[-1]
    if last is None or last.ndim != 3:
        found = None if last is None else tuple(last.shape)
        raise ExitServeError(
            f"hidden_states has {found} as its last entry, the target of all others; expected a "
            f"tensor [B, T, D]."
        )
    inner: list[tuple[float, Tensor]] = []
    for layer, weight in zip(layers[:-1], scale[:-1], strict=True):
        states = hidden_states[layer - 1]
        if states is None:
            raise ExitServeError(f"hidden_states has no tensor for layer {layer}, which counts.")
        if states.shape[: 3 if width else 2] != last.shape[: 3 if width else 2]:
            raise ExitServeError(
                f"hidden states of layer {layer} have shape {tuple(states.shape)}, those of the "
                f"last layer {tuple(last.shape)}; expected the same [B, T, D]."
            )
        inner.append((weight, states))
    return inner, last


def _counted_tokens(states: Tensor, mask: Tensor | None) -> Tensor | None:
    """Bool [B*T], or None if every token counts."""
    if mask is None:
        return None
    if mask.shape != states.shape[:2]:
        raise ExitServeError(
            f"mask has shape {tuple(mask.shape)}, the hidden states {tuple(states.shape)}; "
            f"expected [B, T] and [B, T, D]."
        )
    return mask.reshape(-1).bool()


def _rows(states: Tensor, counted: Tensor | None) -> Tensor:
    """The counted tokens' states [N, D]: dropped tokens cost nothing and may hold anything."""
    flat = states.reshape(states.shape[0] * states.shape[1], states.shape[2])
    return flat if counted is None else flat[counted]
