"""The checks that operations over pairs of tokens share: `simreg` and `dispersion`."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def check_pairs(
    vectors: Tensor,
    per_token: Tensor,
    temperature: float,
    names: tuple[str, str],
    kind: torch.dtype,
) -> None:
    """Checks the arguments of a sum over pairs of tokens.

    Args:
        vectors: [B, T, D].
        per_token: [B, T], of type `kind`, on the same device.
        temperature: above 0.
        names: of both tensors, for messages.
        kind: int64 labels or a bool mask.

    Raises:
        ValueError: shapes, types or devices do not match, or the temperature is not above 0.
    """
    first, second = names
    if vectors.dim() != 3 or per_token.shape != vectors.shape[:2]:
        raise ValueError(
            f"{first} {tuple(vectors.shape)} and {second} {tuple(per_token.shape)} do not match; "
            f"expected [B, T, D] and [B, T]."
        )
    if not vectors.is_floating_point():
        raise ValueError(f"{first}.dtype is {vectors.dtype}; expected a floating-point type.")
    if per_token.dtype != kind:
        raise ValueError(f"{second}.dtype is {per_token.dtype}; expected {kind}.")
    if per_token.device != vectors.device:
        raise ValueError(
            f"{first} are on {vectors.device}, {second} on {per_token.device}; expected one device."
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature {temperature!r} must be a finite number above 0.")
