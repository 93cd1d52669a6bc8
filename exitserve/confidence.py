"""The exit check's arithmetic: logits to token, confidence and exit mask.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def max_prob(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy token and largest softmax probability of raw logits [N, V], in float32.

    The logits are those before temperature, penalties and masks, so a threshold means the same
    whatever the sampling parameters. NaN logits give NaN confidence, which passes no threshold.

    Returns:
        `(token [N] int64, confidence [N] float32)`.
    """
    scores = logits.float()
    top, token = scores.max(dim=-1)
    return token, torch.exp(top - torch.logsumexp(scores, dim=-1))


def exit_mask(
    token: Tensor,
    confidence: Tensor,
    threshold: Tensor,
    eos_threshold: Tensor,
    eos_token_ids: Tensor,
) -> Tensor:
    """Which tokens exit: confidence above their own threshold.

    Args:
        token: [N] greedy tokens.
        confidence: [N].
        threshold: [N], for ordinary tokens.
        eos_threshold: [N], for tokens that end the sequence.
        eos_token_ids: [K] ids of end-of-sequence tokens; may be empty.

    Returns:
        [N] bool.
    """
    if eos_token_ids.numel():
        threshold = torch.where(torch.isin(token, eos_token_ids), eos_threshold, threshold)
    return confidence > threshold
