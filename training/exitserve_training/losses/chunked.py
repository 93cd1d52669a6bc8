"""Cross-entropy that never holds the logits of more than one chunk of tokens.

Logits dominate the memory of multi-exit training: with N = B*T tokens, vocabulary V and E
exits, plain code keeps E*N*V floats for the backward pass (8 exits of a 32k vocabulary at 8192
tokens: 8 GB). Here each chunk of tokens is classified under `torch.utils.checkpoint`: forward
keeps the chunk's hidden states and one scalar, backward computes the chunk's logits again. At
any moment one chunk's logits [chunk, V] exist. The price is one more head forward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

IGNORED = -100
"""The label of a token that has no target, as everywhere in Hugging Face."""

CHUNK_TOKENS = 512
"""Tokens classified at once. Measured on two CPU cores, 2048 tokens, V = 4096, forward and
backward: 115 ms in one chunk, 39 ms in chunks of 512 (their logits stay in cache), 59 ms in
chunks of 128."""

Classifier = Callable[[Tensor], Tensor]
"""Un-normed hidden states [N, D] to logits [N, V]: final norm, then LM head."""


def _chunk_sum(hidden: Tensor, labels: Tensor, classifier: Classifier) -> Tensor:
    # float32 whatever the classifier's dtype: bf16 has 3 digits, and V exponentials are summed.
    logits = classifier(hidden).float()
    return functional.cross_entropy(logits, labels, reduction="sum")


def chunked_cross_entropy(
    hidden: Tensor,
    classifier: Classifier,
    labels: Tensor,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Tensor:
    """Returns the summed cross-entropy (nats, float32 scalar) of N tokens.

    Args:
        hidden: un-normed hidden states [N, D].
        classifier: maps [N, D] to [N, V].
        labels: targets [N], none of them ignored.
        chunk_tokens: tokens whose logits may exist at once.
    """
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    recompute = torch.is_grad_enabled()
    for start in range(0, hidden.shape[0], chunk_tokens):
        part = hidden[start : start + chunk_tokens]
        target = labels[start : start + chunk_tokens]
        if recompute:
            # The classifier draws no random numbers, so the generator's state need not be kept.
            total = total + checkpoint(
                _chunk_sum, part, target, classifier, use_reentrant=False, preserve_rng_state=False
            )
        else:
            total = total + _chunk_sum(part, target, classifier)
    return total
