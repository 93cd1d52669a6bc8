"""The dispersion loss's sum over pairs: how close in angle the tokens of a sequence are.

The fused form never stores the angles of all pairs. The formulas are in README.md in this folder.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exitserve_kernels.dispatch import Asked, choose
from exitserve_kernels.dispersion import reference
from exitserve_kernels.pairs import check_pairs


def log_sum(
    units: Tensor, mask: Tensor, temperature: float, implementation: Asked = "auto"
) -> Tensor:
    """Eq. 2 (dispersion loss) of each sequence, as in the paper, [B] float32.

        log sum over i != j of exp(-d_ij / temperature),   d_ij = arccos(<u_i, u_j>) / pi

    Sums over pairs of counted tokens, each pair twice, as (i, j) and (j, i); -inf, with no
    gradient, if there is no pair. Cosines are clamped to [-1 + 1e-6, 1 - 1e-6]; clamped pairs
    give no gradient. NaN in a counted vector makes its sequence NaN. Differentiable once, in the
    vectors.

    Args:
        units: u, [B, T, D], of length 1 (or 0). float32, bfloat16 or float16; products and sums
            are float32. (The PyTorch form also takes float64 and computes in it.)
        mask: bool [B, T]: which tokens count.
        temperature: tau, above 0.
        implementation: `auto`, `triton` or `torch`.

    Raises:
        ValueError: shapes or types do not match, or the temperature is not above 0.
    """
    check_pairs(units, mask, temperature, ("units", "mask"), torch.bool)
    if choose("dispersion", units.device, implementation) == "torch" or not units.numel():
        return reference.log_sum(units, mask, temperature)
    if units.dtype == torch.float64:
        raise ValueError("units.dtype is torch.float64, which needs implementation='torch'.")
    from exitserve_kernels.dispersion import fused

    return fused.log_sum(units, mask, temperature)
