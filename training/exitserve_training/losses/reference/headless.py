"""Contrastive weight tying and the balanced cross-entropy, a position at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def contrastive_weight_tying(
    outputs: Tensor, target_embeddings: Tensor, target_ids: Sequence[int] | None = None
) -> Tensor:
    """Section 3.2 of the headless paper, from [N, D] and [N, D].

    With `target_ids`, other positions of the same token are left out of the sum.
    """
    positions = range(outputs.shape[0])
    total = torch.zeros(())
    for i in positions:
        scores = []
        for j in positions:
            repeat = target_ids is not None and j != i and target_ids[j] == target_ids[i]
            if not repeat:
                scores.append(torch.dot(outputs[i].float(), target_embeddings[j].float()))
        own = torch.dot(outputs[i].float(), target_embeddings[i].float())
        total = total - (own - torch.logsumexp(torch.stack(scores), dim=0))
    return total / len(positions)


def balanced_cross_entropy(logits: Tensor, labels: Sequence[int]) -> Tensor:
    """Appendix B.1 of the headless paper, from [N, C]: the mean of the classes' mean losses."""
    class_means = []
    for chosen in sorted(set(labels)):
        losses = []
        for row, label in zip(logits, labels, strict=True):
            if label == chosen:
                losses.append(-torch.log_softmax(row.float(), dim=0)[label])
        class_means.append(torch.stack(losses).mean())
    return torch.stack(class_means).mean()
