"""The dispersion loss's sum over pairs: how close in angle the tokens of a sequence are.

The fused form never writes the angles of all pairs. README.md beside this file has the formulas.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exitserve_kernels.dispatch import Asked, choose
from exitserve_kernels.dispersion import reference


def log_sum(
    units: Tensor, mask: Tensor, temperature: float, implementation: Asked = "auto"
) -> Tensor:
    """Eq. 2 (dispersion loss) of each sequence as printed, [B] float32.

        log sum over i != j of exp(-d_ij / temperature),   d_ij = arccos(<u_i, u_j>) / pi

    Pairs of counted tokens, each pair twice, as (i, j) and (j, i); -inf where there is none, and
    no gradient then. Cosines are cut to 1e-6 from -1 and 1; pairs beyond give no gradient. NaN
    in a counted vector makes its sequence NaN. Differentiable once, in the vectors.

    Args:
        units: u, [B, T, D], of length 1 (or 0). float32, bfloat16 or float16; products and sums
            are float32. (float64 in PyTorch, throughout.)
        mask: bool [B, T]: which tokens count.
        temperature: tau, above 0.
        implementation: `auto`, `triton` or `torch`.

    Raises:
        ValueError: shapes or types do not go together, or the temperature is not above 0.
    """
    reference.check(units, mask, temperature)
    if choose("dispersion", units.device, implementation) == "torch" or not units.numel():
        return reference.log_sum(units, mask, temperature)
    if units.dtype == torch.float64:
        raise ValueError("units are torch.float64, which needs implementation='torch'.")
    from exitserve_kernels.dispersion import fused

    return fused.log_sum(units, mask, temperature)
