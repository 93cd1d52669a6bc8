"""Whether an exit can be used: how often, and above which confidence, it says what full depth says.

M tokens, K thresholds.
"""

import torch
from torch import Tensor

from exitserve.checkpoint.block import TrainedExit
from exitserve_training.losses.aligned import Predictions

THRESHOLDS = tuple(step / 20 for step in range(20))
LEAST_AGREEMENT = 0.9
"""Of the tokens above a threshold, those that must be full depth's."""
LEAST_SHARE = 0.1
"""Of all tokens, those that must be above it."""
HALF = 0.5
"""The agreement that a run is told the way to: drafts of such an exit begin to pay."""


def above(said: Predictions, full_depth: Tensor) -> Tensor:
    """Counts an exit's tokens above each threshold, and those of them that agree: [2, K].

    Args:
        said: by the exit.
        full_depth: its most likely tokens [M].
    """
    limits = torch.tensor(THRESHOLDS, device=full_depth.device)
    passes = said.confidence[:, None] > limits
    agrees = passes & (said.token == full_depth)[:, None]
    return torch.stack([passes.sum(0), agrees.sum(0)]).float()


def verdict(counts: Tensor, before: Tensor | None, tokens: int) -> TrainedExit:
    """What is recorded of an exit.

    Args:
        counts: `above` over the held-out text, [2, K].
        before: the same before training; None where the run was resumed.
        tokens: seen in training.
    """
    total, agreement = counts[0, 0].clamp(min=1), _agreement(counts)
    usable = counts[1] >= LEAST_AGREEMENT * counts[0]
    usable &= counts[0] >= LEAST_SHARE * total
    for threshold, share, is_usable in zip(THRESHOLDS, counts[0] / total, usable, strict=True):
        if is_usable:
            return TrainedExit(
                agreement=round(agreement, 4), usable_from=threshold, share=round(float(share), 4)
            )
    gained = 0.0 if before is None else agreement - _agreement(before)
    left = HALF - agreement
    # A gain of less than a hundredth may be chance.
    more = round(tokens * left / gained, -3) if gained > 0.01 and left > 0 else None
    return TrainedExit(
        agreement=round(agreement, 4), more_tokens=None if more is None else int(more)
    )


def _agreement(counts: Tensor) -> float:
    return float(counts[1, 0] / counts[0, 0].clamp(min=1))
