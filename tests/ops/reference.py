"""Losses of logits and their gradient in PyTorch, formula by formula.

Shapes: N tokens, V vocabulary.
"""

import torch
from torch import Tensor


def logit_losses(
    logits: Tensor,
    labels: Tensor | None,
    ce_scale: Tensor | None,
    teacher: Tensor | None,
    kl_scale: Tensor | None,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    differentiate: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """See `exitserve_kernels.logit_losses`; computes float64 in float64."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    slope = torch.ones_like(wide)
    if soft_cap is not None:
        wide = soft_cap * torch.tanh(wide / soft_cap)
        slope = 1.0 - (wide / soft_cap).square()
    gradient = torch.zeros_like(wide)
    cross_entropy = divergence = None
    if labels is not None:
        log_p = wide.log_softmax(-1)
        target = labels[:, None]
        own = log_p.gather(-1, target)
        cross_entropy = -own[:, 0]
        if ce_scale is not None:
            # p - 1 without cancellation where p is almost 1.
            error = log_p.exp().scatter(-1, target, torch.expm1(own))
            gradient += ce_scale.to(wide.dtype)[:, None] * error
    if teacher is not None:
        log_p = (wide / temperature).log_softmax(-1)
        log_q = (teacher.to(wide.dtype) / temperature).log_softmax(-1)
        p, q = log_p.exp(), log_q.exp()
        # 0 log 0 is 0, whatever the student's probability.
        divergence = (q * (log_q - log_p)).masked_fill(q == 0.0, 0.0).sum(-1)
        if kl_scale is not None:
            gradient += kl_scale.to(wide.dtype)[:, None] * (p - q) / temperature
    if differentiate:
        logits.copy_(gradient * slope)
    return cross_entropy, divergence
