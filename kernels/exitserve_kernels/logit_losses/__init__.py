"""Cross-entropy and the divergence from a teacher of a chunk's logits, with their gradient.

What a training loss needs of logits [N, V] that a head has just written: both losses of each token
and, over the logits, the gradient of their weighted sum. The formulas are in README.md in this
folder.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exitserve_kernels.dispatch import Asked, choose
from exitserve_kernels.logit_losses import in_place


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
    """
    assert logits.dim() == 2, "logits are [N, V]"
    for tensor in (labels, ce_scale, kl_scale):
        assert tensor is None or tensor.shape == logits.shape[:1], "labels and scales are [N]"
    assert labels is None or labels.dtype == torch.int64, "labels are int64"
    assert teacher is None or teacher.shape == logits.shape, "the teacher's logits are [N, V]"
    if differentiate:
        assert labels is None or ce_scale is not None, "a label needs the weight of its loss"
        assert teacher is None or kl_scale is not None, "a teacher needs the divergence's weight"
    compute = in_place.logit_losses
    if choose("logit_losses", logits.device, implementation) == "triton" and logits.numel():
        assert logits.dtype != torch.float64, "float64 needs implementation='torch'"
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
