"""The exit check in PyTorch: the truth in float32, and the form that runs without a GPU.

Shapes: B rows, D hidden, V vocabulary, R slices.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Fields(NamedTuple):
    """What a summary [B, 6] holds of each row's logits x, all [B] float32."""

    top: Tensor
    """m, the greatest."""
    total: Tensor
    """Sum of exp(x - m)."""
    token: Tensor | None
    """The first that has m (exact up to 2^24)."""
    second: Tensor | None
    """The second greatest logit."""
    weighted: Tensor | None
    """Sum of (x - m) exp(x - m)."""
    end: Tensor | None
    """The greatest logit of a token that ends the text."""


FIELDS = Fields._fields


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
    rows: Tensor,
    head: Head,
    norm: tuple[Tensor, float] | None = None,
    first_token: int = 0,
    kept: Tensor | None = None,
) -> Tensor:
    """The summary [B, 6] of one slice; matrix product in the rows' type, the rest in float32.

    `kept` [B, columns] takes the logits.
    """
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
    if kept is not None:
        kept.copy_(own)
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


def of_written(logits: Tensor, criterion: str, ends: Tensor | None) -> Fields:
    """`of_logits` where they are written already [B, V], in any type: the fast form on a CPU.

    Only what `criterion` needs is computed, with as few calls and as little fresh memory as can
    be; the token is not looked for. `ends` are columns [K].
    """
    top = logits.amax(dim=-1)
    # One copy, worked on in place: fresh megabytes cost more than the arithmetic on them.
    scores = logits.to(torch.float32, copy=True).sub_(top[:, None])
    second = weighted = end = None
    if criterion == "margin":
        second = logits.topk(2, dim=-1).values[:, 1] if logits.shape[1] > 1 else top - math.inf
    if criterion == "entropy":
        powers = scores.exp()
        total = powers.sum(dim=-1)
        # 0 times infinity: a logit of -inf adds nothing.
        finite = scores.clamp_(min=torch.finfo(torch.float32).min)
        weighted = powers.mul_(finite).sum(dim=-1)
    else:
        total = scores.exp_().sum(dim=-1)
    if ends is not None:
        end = logits[:, ends].amax(dim=-1) if len(ends) else top - math.inf
    return Fields(top, total, None, second, weighted, end)


def stacked(fields: Fields) -> Tensor:
    """The summary [B, 6]: fields that are not there are NaN."""
    unknown = torch.full_like(fields.total, math.nan)
    return torch.stack([unknown if one is None else one.float() for one in fields], dim=-1)


def join(summaries: Tensor) -> Tensor:
    """One summary [B, 6] from those of slices [B, R, 6], in the order of their tokens."""
    if summaries.shape[1] == 1:
        return summaries[:, 0]
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


def decided(
    fields: Fields,
    thresholds: Tensor,
    criterion: str,
    vocab_size: int,
    end_thresholds: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The confidence [B] and who exits [B]: above the threshold that applies to the row's top."""
    top, total, _, second, weighted, end = fields
    if criterion == "max_prob":
        confidence = total.reciprocal()
    elif criterion == "margin":
        assert second is not None
        confidence = (1.0 - torch.exp(second.float() - top.float())) / total
    else:
        assert weighted is not None
        entropy = torch.log(total) - weighted / total
        confidence = 1.0 - entropy / math.log(max(vocab_size, 2))
    if end_thresholds is not None:
        assert end is not None, "end_thresholds need tokens that end the text"
        thresholds = torch.where(end == top, end_thresholds, thresholds)
    return confidence, confidence > thresholds
