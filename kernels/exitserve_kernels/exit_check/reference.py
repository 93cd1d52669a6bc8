"""The exit check in PyTorch: the truth in float32, and the form that runs without a GPU.

Shapes: B rows, D hidden, V vocabulary, R slices.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

FIELDS = ("top", "total", "token", "second", "weighted", "end")
"""Of a summary [.., 6], all float32, x the logits and m their greatest:

m; sum of exp(x - m); the first token that has m (exact up to 2^24); the second greatest logit;
sum of (x - m) exp(x - m); the greatest logit of a token that ends the text.
"""


class Head(NamedTuple):
    """An LM head, or a slice of one; see `exit_check`."""

    weight: Tensor
    bias: Tensor | None = None
    soft_cap: float | None = None
    scale: float = 1.0
    vocab_size: int | None = None
    ends: Tensor | None = None
    rounded: bool = False

    @property
    def columns(self) -> int:
        """Tokens of this slice, without padding."""
        return self.weight.shape[0] if self.vocab_size is None else self.vocab_size


def check_shapes(rows: Tensor, head: Head, gain: Tensor | None) -> None:
    """Raises `ValueError` for what cannot be multiplied."""
    weight = head.weight
    if rows.dim() != 2 or weight.dim() != 2 or rows.shape[1] != weight.shape[1]:
        raise ValueError(
            f"rows {tuple(rows.shape)} and weight {tuple(weight.shape)} do not go together; "
            f"expected [B, D] and [V, D]."
        )
    if rows.dtype != weight.dtype:
        raise ValueError(
            f"rows are {rows.dtype} and weight is {weight.dtype}; expected the same type."
        )
    if not 0 < head.columns <= weight.shape[0]:
        raise ValueError(
            f"vocab_size {head.columns} is not in 1..{weight.shape[0]}, the weight's rows."
        )
    if head.soft_cap is not None and head.soft_cap <= 0:
        raise ValueError(f"soft_cap {head.soft_cap} must be above 0, or None for no cap.")
    vectors = (("bias", head.bias, 0), ("ends", head.ends, 0), ("norm.gain", gain, 1))
    for name, vector, side in vectors:
        if vector is not None and vector.shape != weight.shape[side : side + 1]:
            raise ValueError(
                f"{name} has shape {tuple(vector.shape)}; expected [{weight.shape[side]}]."
            )


def summarise(
    rows: Tensor, head: Head, norm: tuple[Tensor, float] | None = None, first_token: int = 0
) -> Tensor:
    """The summary [B, 6] of one slice; matrix product in the rows' type, the rest in float32."""
    if norm is not None:
        gain, epsilon = norm
        wide = rows.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
        rows = (wide * gain.float()).to(rows.dtype)
    logits = functional.linear(rows, head.weight[: head.columns])
    own = logits.float()
    if head.bias is not None:
        own = own + head.bias[: head.columns].float()
    if head.soft_cap is not None:
        own = torch.tanh(own / head.soft_cap) * head.soft_cap
    own = own * head.scale
    if head.rounded:
        own = own.to(rows.dtype).float()
    return of_logits(own, None if head.ends is None else head.ends[: head.columns], first_token)


def of_logits(logits: Tensor, ends: Tensor | None = None, first_token: int = 0) -> Tensor:
    """The summary [B, 6] of float32 logits [B, V]; `ends` is a mask [V]."""
    top = logits.amax(dim=-1)
    # argmax gives any one of equals; the first is what every rank and every tile can agree on.
    places = torch.arange(logits.shape[1], device=logits.device)
    token = places.where(logits == top[:, None], logits.shape[1] - 1).amin(dim=-1)
    others = logits.masked_fill(places == token[:, None], -math.inf)
    shifted = logits - top[:, None]
    powers = shifted.exp()
    # 0 times infinity: a logit of -inf adds nothing.
    weighted = (shifted * powers).masked_fill(logits == -math.inf, 0.0)
    end = torch.full_like(top, -math.inf)
    if ends is not None:
        end = logits.masked_fill(~ends, -math.inf).amax(dim=-1)
    return torch.stack(
        [
            top,
            powers.sum(dim=-1),
            (token + first_token).float(),
            others.amax(dim=-1),
            weighted.sum(dim=-1),
            end,
        ],
        dim=-1,
    )


def join(summaries: Tensor) -> Tensor:
    """One summary [B, 6] from those of slices [B, R, 6], in the order of their tokens."""
    top, total, token, second, weighted, end = summaries.unbind(dim=-1)
    best = top.amax(dim=-1)
    winner = (top == best[:, None]).int().argmax(dim=-1, keepdim=True)
    lag = top - best[:, None]
    share = lag.exp()
    # A slice whose logits are all -inf adds nothing; its own sums are of exp(-inf - -inf).
    empty = top == -math.inf
    lag, total, weighted = (one.masked_fill(empty, 0.0) for one in (lag, total, weighted))
    runners_up = torch.cat([top.scatter(1, winner, -math.inf), second], dim=-1)
    return torch.stack(
        [
            best,
            (total * share).sum(dim=-1),
            token.gather(1, winner).squeeze(1),
            runners_up.amax(dim=-1),
            (share * (weighted + lag * total)).sum(dim=-1),
            end.amax(dim=-1),
        ],
        dim=-1,
    )


def confidence(summary: Tensor, criterion: str, vocab_size: int) -> Tensor:
    """The confidence [B] of whole summaries [B, 6]."""
    top, total, _, second, weighted, _ = summary.unbind(dim=-1)
    if criterion == "max_prob":
        return 1.0 / total
    if criterion == "margin":
        return (1.0 - torch.exp(second - top)) / total
    entropy = torch.log(total) - weighted / total
    return 1.0 - entropy / math.log(max(vocab_size, 2))


def exits(
    summary: Tensor, confidence: Tensor, thresholds: Tensor, end_thresholds: Tensor | None
) -> Tensor:
    """Which rows [B] exit: confidence above the threshold that applies to their top."""
    if end_thresholds is not None:
        thresholds = torch.where(summary[:, 5] == summary[:, 0], end_thresholds, thresholds)
    return confidence > thresholds
