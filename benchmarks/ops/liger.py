"""What Liger-Kernel has that is nearest to our operations, called at its best.

Nothing here keeps gradients. Liger-Kernel is imported where it is called: it may be missing, and it
imports Triton.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from exitserve_kernels.propagate_kv import Caches, KeyNorm, Rotary

PACKAGE, TESTED = "liger-kernel", "0.8.5"


def versions() -> dict[str, str]:
    """The installed version; empty if it is not installed."""
    try:
        return {PACKAGE: importlib.metadata.version(PACKAGE)}
    except importlib.metadata.PackageNotFoundError:
        return {}


def remark() -> str:
    """One line about what is installed."""
    found = versions().get(PACKAGE)
    if found is None:
        return f"{PACKAGE} is not installed: not compared with it; pip install {PACKAGE}=={TESTED}"
    return f"{PACKAGE} {found}" + ("" if found == TESTED else f" (written for {TESTED})")


@torch.no_grad()
def top_and_log_probability(rows: Tensor, weight: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token [B] of each row, and log p [B] of a token that the caller names.

    Liger's linear cross-entropy: a library's product writes the logits in the rows' type, a
    kernel reads them once. Unlike `exit_check` it takes the token whose probability it gives
    (our confidence, if that is the likeliest), it knows neither the second nor the entropy nor
    thresholds, and it waits for the host, which counts the tokens.

    Args:
        rows: [B, D].
        weight: [V, D].
        tokens: [B] int64.
    """
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    vocabulary, width = weight.shape
    found = liger_fused_linear_cross_entropy(
        rows,
        weight,
        tokens,
        reduction="none",
        return_predicted_tokens=True,
        # All rows at once; by default a few, and the weights are read again for each few.
        chunk_mem_const=-(-vocabulary // width),
    )
    return found.predicted_tokens, -found.loss


@torch.no_grad()
def fill(
    projected: Tensor,
    positions: Tensor,
    slots: Tensor,
    caches: Caches,
    key_norm: KeyNorm,
    rotary: Rotary,
) -> None:
    """`propagate_kv.fill` with Liger's norm and rotation, all layers at once.

    Liger writes no cache, and its norm has one gain a call: gains and writes are PyTorch's. For
    gains of each head [S, P], one rotary table for all layers, and slots that are not negative.
    """
    from liger_kernel.transformers.functional import liger_rms_norm
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    layers, block_size = len(caches.keys), caches.keys[0].shape[1]
    heads, size = caches.keys[0].shape[2:]
    apart = projected.reshape(len(positions), layers, 2, heads, size)
    keys, values = apart.transpose(0, 1).unbind(dim=2)
    keys = liger_rms_norm(keys, None, key_norm.epsilon, casting_mode="gemma")
    keys.mul_(key_norm.gains[:, None, None])
    angles = rotary.tables[0][positions][None]
    cos, sin = angles.chunk(2, dim=-1)
    # It rotates queries too: one head, which is forgotten.
    query = keys.new_zeros(layers, 1, len(positions), size)
    _, turned = liger_rotary_pos_emb(
        query, keys.transpose(1, 2), cos, sin, rotary_dim=angles.shape[-1]
    )
    keys = turned.transpose(1, 2)
    block, place = slots // block_size, slots % block_size
    for layer in range(layers):
        caches.keys[layer][block, place] = keys[layer]
        caches.values[layer][block, place] = values[layer]


@torch.no_grad()
def logit_losses(logits: Tensor, labels: Tensor, teacher: Tensor | None) -> list[Tensor]:
    """The losses [N] of logits [N, V], over which the gradient of their sum is written.

    The kernels of Liger's cross-entropy and of its linear KL divergence, each of which writes its
    gradient over the logits, so that one of them needs a copy. The second takes probabilities,
    and neither takes a weight for each token.
    """
    from liger_kernel.backends import dispatch
    from liger_kernel.ops.cross_entropy import cross_entropy_forward

    copy = logits if teacher is None else logits.clone()
    # It writes the gradient where one is asked for.
    copy.requires_grad_()
    options = {"lse_square_scale": 0.0, "label_smoothing": 0.0, "softcap": None}
    cross_entropy, *_ = cross_entropy_forward(
        copy, labels, None, -100, reduction="none", return_z_loss=False, **options
    )
    copy.requires_grad_(False)
    if teacher is None:
        return [cross_entropy]
    chances = teacher.softmax(dim=-1)
    divergence, found = dispatch("kl_loss_and_grad", logits, chances, None, -100, 1.0, 1e-10, 1.0)
    torch.add(found, copy, out=logits)
    return [cross_entropy, divergence]
