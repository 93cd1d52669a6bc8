"""The exit check's arithmetic: logits to confidence and exit mask.

Shapes: N tokens, V vocabulary, R slices of it (ranks of tensor parallelism).
"""

from __future__ import annotations

import torch
from torch import Tensor


def max_prob(logits: Tensor, eos_token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Largest softmax probability of raw logits [N, V] in float32, and whether it ends the text.

    The logits are those before temperature, penalties and masks, so a threshold means the same
    whatever the sampling parameters. NaN logits give NaN confidence, which passes no threshold.

    Args:
        logits: [N, V].
        eos_token_ids: [K] ids of end-of-sequence tokens; may be empty.

    Returns:
        `(confidence [N], ends [N] bool)`. An end of sequence that shares the first place counts.
    """
    return join_slices(slice_summary(logits, eos_token_ids)[:, None])


def slice_summary(logits: Tensor, eos_token_ids: Tensor) -> Tensor:
    """What a slice of the vocabulary adds to `max_prob`.

    Args:
        logits: [N, V / R] of this slice.
        eos_token_ids: [K] columns of this slice that are end-of-sequence tokens; may be empty.

    Returns:
        [N, 3] float32: greatest logit, sum of exp(logit - greatest), greatest end of sequence.
    """
    top = logits.amax(dim=-1, keepdim=True)
    # One copy, worked on in place: fresh megabytes cost more than the arithmetic on them.
    scores = logits.to(torch.float32, copy=True).sub_(top)
    ends = torch.full_like(top, -torch.inf)
    if eos_token_ids.numel():
        ends = logits[:, eos_token_ids].amax(dim=-1, keepdim=True)
    total = scores.exp_().sum(dim=-1, keepdim=True)
    return torch.cat([top.float(), total, ends.float()], dim=-1)


def join_slices(summaries: Tensor) -> tuple[Tensor, Tensor]:
    """`max_prob` of the whole vocabulary from the summaries [N, R, 3] of its slices."""
    top, totals, ends = summaries.unbind(dim=-1)
    best = top.amax(dim=-1, keepdim=True)
    total = (totals * torch.exp(top - best)).sum(dim=-1)
    return 1.0 / total, (ends == best).any(dim=-1)


def exit_mask(confidence: Tensor, ends: Tensor, threshold: Tensor, eos_threshold: Tensor) -> Tensor:
    """Which tokens exit: confidence above their own threshold.

    Args:
        confidence: [N].
        ends: [N] bool, whether the token ends the sequence.
        threshold: [N], for ordinary tokens.
        eos_threshold: [N], for tokens that end the sequence.

    Returns:
        [N] bool.
    """
    return confidence > torch.where(ends, eos_threshold, threshold)
