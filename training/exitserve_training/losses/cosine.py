"""Alignment of the directions of shallow layers with the last one's.

The baseline of the aligned-training paper, appendix C:

    L_sim = sum over l = 1..L of lambda_l * (1 - cos(h^l, h^L))

h^l is the residual stream after layer l. The term l = L is 0 and is not computed; it keeps its
share of the weights, as in the paper's sum over 1..L.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from exitserve_training.losses.tokens import at_least_float32, unit_vectors


def cosine_alignment(
    hidden: Mapping[int, Tensor], scale: Mapping[int, float], *, mask: Tensor | None = None
) -> Tensor:
    """Returns L_sim: how far the layers' states point away from the last layer's (0 to 2).

    The paper adds it to the last layer's cross-entropy, times a coefficient beta (L_CE-reg); it
    finds that this helps far less than the aligned loss (figure 13). Choices the text leaves
    open: gradients reach h^L too, since the formula shows no stop-gradient; the states are not
    centred, since centring (footnote 1) belongs to a measurement over a data set and would here
    tie the tokens of a batch to each other.

    A vector whose largest entry is below the smallest normal number of its dtype has no
    direction: its cosine counts as 0, without gradient.

    Args:
        hidden: layer to un-normed states [B, T, D], the deepest being the target of all others.
            Computed in at least float32; backward computes a layer again instead of keeping
            copies.
        scale: layer to its weight, for every layer of `hidden`.
        mask: bool [B, T], the tokens that count; None for all. With none the loss is 0.
    """
    last = max(hidden)
    counted = None if mask is None else mask.bool()
    # A sum over no features: zeros [N] that still hang on the graph if no other layer counts.
    total = at_least_float32(_rows(hidden[last][..., :0], counted)).sum(-1)
    for layer, states in hidden.items():
        if layer != last:
            distance: Tensor = checkpoint(
                _one_minus_cosine,
                states,
                hidden[last],
                counted,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            total = total + scale[layer] * distance
    return total.sum() / max(total.numel(), 1)


def _one_minus_cosine(states: Tensor, target: Tensor, counted: Tensor | None) -> Tensor:
    """[N], one number per counted token."""
    own, other = _rows(states, counted), _rows(target, counted)
    return 1.0 - (_direction(own) * _direction(other)).sum(-1)


def _direction(rows: Tensor) -> Tensor:
    return unit_vectors(at_least_float32(rows), torch.finfo(rows.dtype).tiny)


def _rows(states: Tensor, counted: Tensor | None) -> Tensor:
    """The counted tokens' states [N, D]: dropped tokens cost nothing and may hold anything."""
    return states.flatten(0, 1) if counted is None else states[counted]
