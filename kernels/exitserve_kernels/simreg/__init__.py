"""SimReg's sums over pairs: each token's similarity with others of its label and of other labels.

The fused form never stores the similarities of all pairs. The formulas are in README.md in this
folder.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exitserve_kernels.dispatch import Asked, choose
from exitserve_kernels.pairs import check_pairs
from exitserve_kernels.simreg import reference


def log_sums(
    vectors: Tensor, labels: Tensor, temperature: float, implementation: Asked = "auto"
) -> tuple[Tensor, Tensor]:
    """The two log-sum-exps of eq. 3 (SimReg) for each token, [B, T] float32 each.

    With s_ij = <e_i, e_j> / temperature, over counted tokens j of the same sequence:

        negatives_i = log sum over j with another label of exp(s_ij)
        positives_i = log sum over j with i's label, i among them, of exp(s_ij)

    and L_i = negatives_i - positives_i. A sum over no token is -inf, and so are both sums of a
    token that does not count; such entries give no gradient. NaN in a counted vector reaches
    every token that is compared with it. Differentiable once, in the vectors.

    Args:
        vectors: e, [B, T, D]: unit vectors for cosines. float32, bfloat16 or float16; products
            and sums are float32. (The PyTorch form also takes float64 and computes in it.)
        labels: [B, T] int64; a token whose label is negative does not count.
        temperature: tau, above 0.
        implementation: `auto`, `triton` or `torch`.

    Raises:
        ValueError: shapes or types do not match, or the temperature is not above 0.
    """
    check_pairs(vectors, labels, temperature, ("vectors", "labels"), torch.int64)
    if choose("simreg", vectors.device, implementation) == "torch" or not vectors.numel():
        return reference.log_sums(vectors, labels, temperature)
    if vectors.dtype == torch.float64:
        raise ValueError("vectors.dtype is torch.float64, which needs implementation='torch'.")
    from exitserve_kernels.simreg import fused

    return fused.log_sums(vectors, labels, temperature)
