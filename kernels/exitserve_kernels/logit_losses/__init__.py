"""Cross-entropy and the divergence from a teacher of a chunk's logits, with their gradient.

What a training loss needs of logits [N, V] that a head has just written: both losses of each token
and, over the logits, the gradient of their weighted sum. The formulas are in README.md in this
folder.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from exitserve_kernels.dispatch import Asked, choose
from exitserve_kernels.logit_losses import in_place

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@torch.no_grad()
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
    implementation: Asked = "auto",
) -> tuple[Tensor | None, Tensor | None]:
    """The cross-entropy and the divergence of each token, [N] float32 each, in nats.

    With a the logits (soft-capped, if there is a cap), t the teacher's, p = softmax(a), T the
    temperature, P = softmax(a / T) and Q = softmax(t / T):

        cross-entropy_i = -log p_i[label_i]        divergence_i = KL(Q_i || P_i)

    unweighted and detached; None for what was not asked for. If `differentiate`, the gradient of

        sum over i of ce_scale_i * cross-entropy_i + kl_scale_i * divergence_i

    in the logits before the cap is written over the logits, in their type; otherwise they stay as
    they are. Softmax and sums are float32. An entry of the vocabulary to which the teacher gives
    probability 0 adds nothing to the divergence, even where the student's logit is -inf.

    Args:
        logits: the head's [N, V], before a soft cap: float32, bfloat16 or float16. (The PyTorch
            form also takes float64 and computes in it.)
        labels: int64 [N], all in [0, V), which is not checked; None for no cross-entropy.
        ce_scale: [N], the weight of each cross-entropy; needed with labels if `differentiate`.
        teacher: logits [N, V] of the teacher, soft-capped already, in any of the types; never
            written. None for no divergence.
        kl_scale: [N], the weight of each divergence, such as T^2 / N; needed with a teacher if
            `differentiate`.
        temperature: T of the divergence, above 0. The cross-entropy is at 1.
        soft_cap: c, above 0: a = c tanh(logits / c). None for no cap.
        differentiate: whether to write the gradient.
        implementation: `auto`, `triton` or `torch`.

    Raises:
        ValueError: shapes, types or devices do not match, neither labels nor a teacher are
            given, a scale is missing, or the temperature or the cap is not above 0.
    """
    _check(logits, labels, ce_scale, teacher, kl_scale, differentiate)
    for name, value in (("temperature", temperature), ("soft_cap", soft_cap)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} {value!r} must be a finite number above 0.")
    compute = in_place.logit_losses
    if choose("logit_losses", logits.device, implementation) == "triton" and logits.numel():
        if logits.dtype == torch.float64:
            raise ValueError("logits.dtype is torch.float64, which needs implementation='torch'.")
        from exitserve_kernels.logit_losses import fused

        compute = fused.logit_losses
    return compute(
        logits,
        labels,
        ce_scale,
        teacher,
        kl_scale,
        temperature=temperature,
        soft_cap=soft_cap,
        differentiate=differentiate,
    )


def _check(
    logits: Tensor,
    labels: Tensor | None,
    ce_scale: Tensor | None,
    teacher: Tensor | None,
    kl_scale: Tensor | None,
    differentiate: bool,
) -> None:
    """Raises `ValueError` if the tensors do not fit."""
    if logits.dim() != 2 or logits.dtype not in TYPES:
        raise ValueError(
            f"logits are {tuple(logits.shape)} of {logits.dtype}; expected [N, V] of a "
            f"floating-point type such as float32 or bfloat16."
        )
    if labels is None and teacher is None:
        raise ValueError("labels and teacher are both None; give one of them at least.")
    if labels is not None and labels.dtype != torch.int64:
        raise ValueError(f"labels.dtype is {labels.dtype}; expected torch.int64.")
    if differentiate and labels is not None and ce_scale is None:
        raise ValueError("ce_scale is None; the gradient needs the weight of each label's loss.")
    if differentiate and teacher is not None and kl_scale is None:
        raise ValueError("kl_scale is None; the gradient needs the weight of each divergence.")
    for name, tensor, shape in (
        ("labels", labels, logits.shape[:1]),
        ("ce_scale", ce_scale, logits.shape[:1]),
        ("teacher", teacher, logits.shape),
        ("kl_scale", kl_scale, logits.shape[:1]),
    ):
        if tensor is not None and (tensor.shape != shape or tensor.device != logits.device):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} on {tensor.device}; expected "
                f"{tuple(shape)} on {logits.device}, as the logits."
            )
