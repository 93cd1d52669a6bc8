"""Shared by losses of hidden states: which tokens count, precision, directions, means.

Shapes: B rows (sequences), T tokens, D hidden.
"""

import torch
from torch import Tensor

from exitserve.errors import ExitServeError

IGNORED = -100
"""The label of a token that has no target, as everywhere in Hugging Face."""

SHORTEST = 1e-5
"""A vector whose largest entry is smaller has no direction: its unit vector is 0, without
gradient. A direction's gradient grows as 1/length, so this also keeps it within float16."""


def at_least_float32(values: Tensor) -> Tensor:
    """The values in float32; float64 stays, so that gradients can be checked numerically."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def counted_states(z: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns z, at least float32, with zeros where it does not count; and bool [B, T]: what does.

    Raises:
        ExitServeError: z is not [B, T, D], or mask is not [B, T].
    """
    if z.dim() != 3 or z.numel() == 0 or (mask is not None and mask.shape != z.shape[:2]):
        masked = "no mask" if mask is None else f"a mask of shape {tuple(mask.shape)}"
        raise ExitServeError(
            f"hidden states have shape {tuple(z.shape)}, with {masked}; expected [B, T, D], none "
            f"of them 0, and [B, T]."
        )
    counted = torch.ones_like(z[..., 0], dtype=torch.bool) if mask is None else mask.bool()
    # Filled, not multiplied: padding may hold NaN, and 0 * NaN is NaN.
    return at_least_float32(z).where(counted[..., None], 0.0), counted


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


def mean_of(values: Tensor, known: Tensor) -> Tensor:
    """The mean of the known values; of nothing 0, with zero gradients."""
    return values.masked_fill(~known, 0.0).sum() / known.sum().clamp_min(1)
