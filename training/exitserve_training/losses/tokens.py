"""Shared by losses of hidden states: which tokens count, precision, directions, reductions.

Shapes: B rows (sequences), T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from exitserve.errors import ExitServeError, nearest

IGNORED = -100
"""The label of a token that has no target, as everywhere in Hugging Face."""

Reduction = Literal["mean", "none"]

SHORTEST = 1e-5
"""A vector whose largest entry is smaller has no direction: its unit vector is 0, without
gradient. A direction's gradient grows as 1/length, so this also keeps it within float16."""


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raises ExitServeError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ExitServeError(
            f"{name} {value!r} is unknown; allowed: {', '.join(allowed)}."
            f"{nearest(str(value), allowed)}"
        )


def check_reduction(value: str) -> None:
    """Raises ExitServeError unless `value` is a `Reduction`."""
    check_choice("reduction", value, get_args(Reduction))


def at_least_float32(values: Tensor) -> Tensor:
    """The values in float32; float64 stays, so that gradients can be checked numerically."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def counted_tokens(states: Tensor, mask: Tensor | None) -> Tensor:
    """Returns bool [B, T]: which tokens of states [B, T, D] count.

    Raises:
        ExitServeError: mask is not [B, T].
    """
    if mask is None:
        return torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    if mask.shape != states.shape[:2]:
        raise ExitServeError(
            f"mask has shape {tuple(mask.shape)}, which does not fit hidden states of shape "
            f"{tuple(states.shape)}; expected {tuple(states.shape[:2])}."
        )
    return mask.bool()


def unit_vectors(vectors: Tensor, shortest: float = SHORTEST) -> Tensor:
    """Returns vectors [..., D] divided by their lengths; 0 for those too short for a direction.

    Values and gradients are finite for all finite vectors, and NaN stays NaN.

    Args:
        vectors: in at least float32.
        shortest: a vector whose largest entry is smaller has no direction.
    """
    # Divided by its largest entry first, a vector's square neither overflows nor vanishes; the
    # unit vector is the same, and so is its gradient with that entry held constant.
    peak = vectors.detach().abs().amax(-1, keepdim=True)
    absent = peak < shortest
    scaled = vectors.masked_fill(absent, 0.0) / peak.masked_fill(absent, 1.0)
    square = scaled.square().sum(-1, keepdim=True)
    return scaled / square.masked_fill(absent, 1.0).sqrt()


def reduced(values: Tensor, known: Tensor, reduction: Reduction) -> Tensor:
    """Returns `values` with 0 where not `known` ("none"), or the mean of the known ones ("mean").

    With nothing known the mean is 0, and its gradients are 0.

    Raises:
        ExitServeError: the reduction is unknown.
    """
    check_reduction(reduction)
    values = values.masked_fill(~known, 0.0)
    return values if reduction == "none" else values.sum() / known.sum().clamp_min(1)
