"""The exit check in PyTorch: the reference in float32, and the form that runs without a GPU.

Shapes: B rows, D hidden, V vocabulary, R slices.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Fields(NamedTuple):
    """The fields of a summary [B, 6] of each row's logits x, all [B] float32."""

    top: Tensor
    """m, the greatest logit."""
    total: Tensor
    """The sum of exp(x - m)."""
    token: Tensor
    """The first token whose logit is m (exact up to 2^24)."""
    second: Tensor | None
    """The second greatest logit."""
    weighted: Tensor | None
    """The sum of (x - m) exp(x - m)."""
    end: Tensor | None
    """The greatest logit of an end-of-sequence token."""


FIELDS = Fields._fields


class Head(NamedTuple):
    """An LM head, or a slice of one."""

    weight: Tensor
    """[V, D]. Rows beyond `vocab_size` are padding."""
    bias: Tensor | None = None
    """[V]."""
    soft_cap: float | None = None
    """Logits become cap * tanh(logits / cap), before `scale`, as in vLLM."""
    scale: float = 1.0
    """Multiplies the logits."""
    vocab_size: int | None = None
    """Rows of the weight that are vocabulary; all by default."""
    ends: Tensor | None = None
    """[V] bool: end-of-sequence tokens."""
    rounded: bool = False
    """Round logits to the rows' type first, as a head that writes its logits does."""

    @property
    def columns(self) -> int:
        """Tokens of this slice, without padding."""
        return self.weight.shape[0] if self.vocab_size is None else self.vocab_size


def check_shapes(rows: Tensor, head: Head) -> None:
    """Asserts that a head fits the rows [B, D]."""
    tokens, width = head.weight.shape
    assert rows.dim() == 2 and rows.shape[1] == width, "rows are [B, D], the weight is [V, D]"
    assert rows.dtype == head.weight.dtype, "rows and weight are of one type"
    assert 0 < head.columns <= tokens, "vocab_size is one of the weight's rows at most"
    assert head.soft_cap is None or head.soft_cap > 0, "a cap is above 0, or None"
    for vector in (head.bias, head.ends):
        assert vector is None or vector.shape == (tokens,), "bias and ends are [V]"


def summarise(rows: Tensor, head: Head, first_token: int = 0, kept: Tensor | None = None) -> Tensor:
    """The summary [B, 6] of one slice; matrix product in the rows' type, the rest in float32.

    `kept` [B, columns] receives the logits.
    """
    scores = functional.linear(rows, head.weight[: head.columns]).float()
    if head.bias is not None:
        scores = scores + head.bias[: head.columns].float()
    if head.soft_cap is not None:
        scores = torch.tanh(scores / head.soft_cap) * head.soft_cap
    scores = scores * head.scale
    if head.rounded:
        scores = scores.to(rows.dtype).float()
    if kept is not None:
        kept.copy_(scores)
    ends = None if head.ends is None else head.ends[: head.columns]
    return stacked(fields_of(scores, ends, first_token))


def fields_of(logits: Tensor, ends: Tensor | None = None, first_token: int = 0) -> Fields:
    """The fields for float32 logits [B, V]; `ends` is a mask [V]."""
    top = logits.amax(dim=-1)
    # argmax may return any token of a tie; the first is the same on every rank and in every tile.
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
    sums = powers.sum(dim=-1), weighted.sum(dim=-1)
    return Fields(top, sums[0], token + first_token, others.amax(dim=-1), sums[1], end)


def of_written(logits: Tensor, criterion: str, ends: Tensor | None, first_token: int = 0) -> Fields:
    """The fields for logits [B, V] of any type that exist already: the fast form on a CPU.

    Computes only what `criterion` needs, with few calls and little new memory. `ends` are columns
    [K], `first_token` the id of the first.
    """
    top, token = logits.max(dim=-1)
    # One copy, modified in place: new memory costs more here than the arithmetic.
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
    return Fields(top, total, token + first_token, second, weighted, end)


def decided_by_logits(
    logits: Tensor,
    thresholds: Tensor,
    criterion: str,
    ends: Tensor | None,
    end_thresholds: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `decided`, from all logits [B, V] themselves; `ends` are columns [K].

    A decode step on a CPU waits for this, so it is as few calls as can be; softmax is vectorised,
    which exp() by itself is not.
    """
    chances = logits.softmax(dim=-1, dtype=torch.float32)
    vocab_size, greatest = logits.shape[1], chances.amax(dim=-1)
    if criterion == "max_prob" or vocab_size == 1:
        confidence = greatest
    elif criterion == "margin":
        best = chances.topk(2, dim=-1).values
        confidence = best[:, 0] - best[:, 1]
    else:
        confidence = _certainty(chances)
    if end_thresholds is not None and ends is not None and len(ends):
        # By chances, since the greatest of bfloat16 logits takes as long as their softmax.
        at_end = chances[:, ends].amax(dim=-1) == greatest
        thresholds = torch.where(at_end, end_thresholds, thresholds)
    return confidence, confidence > thresholds


def read(logits: Tensor, criterion: str) -> Tensor:
    """The most likely token and the confidence of each row, from all logits [B, V].

    To be compiled: what the criterion does not need falls away then, and the rest is a few loops
    over the logits. As one tensor [2, B] of float64, which holds both exactly, since each transfer
    to the host takes as long as an operation.
    """
    fields = fields_of(logits.float())
    confidence = confidence_of(fields, criterion, logits.shape[1])
    return torch.stack([fields.token.double(), confidence.double()])


def _certainty(chances: Tensor) -> Tensor:
    """1 - entropy / log V of chances [B, V]."""
    certainty: Tensor = 1.0 - torch.special.entr(chances).sum(dim=-1) / math.log(chances.shape[1])
    return certainty


def stacked(fields: Fields) -> Tensor:
    """The summary [B, 6]; fields that are None become NaN."""
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
    # A slice whose logits are all -inf adds nothing; its sums are of exp(-inf - -inf), NaN.
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
    """The confidence [B], and whether it is above the threshold for the row's top token [B]."""
    confidence = confidence_of(fields, criterion, vocab_size)
    if end_thresholds is not None:
        assert fields.end is not None, "end_thresholds need end-of-sequence tokens"
        thresholds = torch.where(fields.end == fields.top, end_thresholds, thresholds)
    return confidence, confidence > thresholds


def confidence_of(fields: Fields, criterion: str, vocab_size: int) -> Tensor:
    """The confidence [B]."""
    top, total, _, second, weighted, _ = fields
    if criterion == "max_prob":
        return total.reciprocal()
    if criterion == "margin":
        assert second is not None
        return (1.0 - torch.exp(second.float() - top.float())) / total
    assert weighted is not None
    entropy = torch.log(total) - weighted / total
    return 1.0 - entropy / math.log(max(vocab_size, 2))
