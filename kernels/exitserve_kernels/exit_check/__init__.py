"""The exit check: the most likely token of each row, its confidence, and whether the row exits.

A check needs three numbers a row from the head's logits. The fused form computes the logits tile
by tile and keeps only running sums, so the head's weights are read once and no logits are written,
unless a sampler needs those of the rows that exit. The formulas are in README.md in this folder.

A check has two steps: `summarise_slice` (from states and weights) or `summarise_logits` (from
logits that a library computed), then `finish` over the slices of all ranks. `check_logits` does
both for logits of the whole vocabulary.

Shapes: B rows, D hidden, V vocabulary, R slices of it (ranks of tensor parallelism).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from exitserve_kernels.dispatch import Asked, choose
from exitserve_kernels.exit_check import reference
from exitserve_kernels.exit_check.reference import FIELDS, Head

__all__ = [
    "CRITERIA",
    "Criterion",
    "Decision",
    "ExitCheck",
    "Head",
    "HostReading",
    "check_logits",
    "criterion_of",
    "finish",
    "summarise_logits",
    "summarise_slice",
]

Criterion = Literal["max_prob", "margin", "entropy"]
CRITERIA: tuple[Criterion, ...] = get_args(Criterion)


def criterion_of(name: str) -> Criterion:
    """The criterion with this name; raises `ValueError` if there is none."""
    for one in CRITERIA:
        if one == name:
            return one
    raise ValueError(f"criterion {name!r} is unknown; allowed: {', '.join(CRITERIA)}.")


class Decision(NamedTuple):
    """Who exits, where the caller has the logits."""

    confidence: Tensor
    """[B] float32; NaN where a logit is NaN or infinite."""
    exits: Tensor
    """[B] bool: confidence above the row's threshold; False where it is NaN."""


class HostReading(NamedTuple):
    """What the logits of some rows say, for a host that decides."""

    tokens: list[int]
    """[B] the most likely of each."""
    confidence: list[float]
    """[B]; NaN where a logit is NaN or infinite."""

    @classmethod
    def of(cls, read: Tensor) -> HostReading:
        """As numbers of Python's, what `reference.read` found [2, B]."""
        tokens, confidence = read.tolist()
        return cls([int(token) for token in tokens], confidence)


class ExitCheck(NamedTuple):
    """The result of a check for each row."""

    token: Tensor
    """[B] int64, the most likely token, the first one in a tie."""
    top: Tensor
    """[B] float32, its logit."""
    total: Tensor
    """[B] float32, the sum of exp(logit - top)."""
    confidence: Tensor
    """[B] float32; NaN where a logit is NaN or infinite."""
    exits: Tensor
    """[B] bool: confidence above the row's threshold; False where it is NaN."""


def summarise_slice(
    rows: Tensor,
    head: Head,
    *,
    first_token: int = 0,
    logits: Tensor | None = None,
    implementation: Asked = "auto",
) -> Tensor:
    """Summarises one slice of the vocabulary: [B, 6] float32, the fields of `reference.Fields`.

    Args:
        rows: [B, D] states, after the final norm.
        head: this rank's slice; its weight has the rows' type.
        first_token: id of the slice's first token.
        logits: [B, columns of the head], of any floating type and with contiguous rows: receives
            the logits, so that sampling needs no second pass over the head.
        implementation: `auto`, `triton` or `torch`.
    """
    reference.check_shapes(rows, head)
    if logits is not None:
        assert logits.shape == (len(rows), head.columns), "logits are [B, columns of the head]"
        assert logits.stride(1) == 1, "rows of logits are contiguous"
    if choose("exit_check", rows.device, implementation) == "torch" or not rows.shape[0]:
        return reference.summarise(rows, head, first_token, logits)
    from exitserve_kernels.exit_check import fused

    return fused.summarise(rows, head, first_token, logits)


def summarise_logits(
    logits: Tensor,
    *,
    criterion: Criterion = "max_prob",
    end_tokens: Tensor | None = None,
    first_token: int = 0,
) -> Tensor:
    """Summarises one slice from logits that exist already: [B, 6] float32.

    For heads whose product a library computes: packed for a CPU, quantised. Always in PyTorch.
    Fields that the criterion does not need are NaN.

    Args:
        logits: [B, V] of a slice; not modified.
        criterion: as in `finish`.
        end_tokens: [K] columns of end-of-sequence tokens; required if `finish` is given
            `end_thresholds`.
        first_token: id of the slice's first token.

    Raises:
        ValueError: the criterion is unknown.
    """
    criterion_of(criterion)
    return reference.stacked(reference.of_written(logits, criterion, end_tokens, first_token))


def check_logits(
    logits: Tensor,
    thresholds: Tensor,
    *,
    criterion: Criterion = "max_prob",
    end_tokens: Tensor | None = None,
    end_thresholds: Tensor | None = None,
) -> Decision:
    """Checks logits [B, V] of the whole vocabulary that exist already.

    Arguments as in `summarise_logits` and `finish`.

    Raises:
        ValueError: the criterion is unknown.
    """
    criterion_of(criterion)
    return Decision(
        *reference.decided_by_logits(logits, thresholds, criterion, end_tokens, end_thresholds)
    )


def finish(
    summaries: Tensor,
    thresholds: Tensor,
    *,
    criterion: Criterion = "max_prob",
    vocab_size: int,
    end_thresholds: Tensor | None = None,
    implementation: Asked = "auto",
) -> ExitCheck:
    """Decides which rows exit, from the summaries of all slices.

    Args:
        summaries: [B, R, 6], each rank's `summarise_slice`, in the order of their tokens.
        thresholds: [B]; a row exits if its confidence is above its threshold.
        criterion: `max_prob` is the greatest probability, `margin` its lead over the second,
            `entropy` is 1 - entropy / log(vocab_size).
        vocab_size: of all slices together.
        end_thresholds: [B], used instead for rows whose top token is an end-of-sequence token (or
            ties with one); None if there are no such tokens.
        implementation: `auto`, `triton` or `torch`.

    Raises:
        ValueError: the criterion is unknown.
    """
    criterion_of(criterion)
    assert summaries.shape[2:] == (len(FIELDS),), "summaries are [B, R, 6]"
    for given in (thresholds, end_thresholds):
        assert given is None or given.shape == summaries.shape[:1], "a threshold for each row"
    if choose("exit_check", summaries.device, implementation) == "torch" or not len(summaries):
        whole = reference.join(summaries)
        fields = reference.Fields(*whole.unbind(dim=-1))
        confidence, exits = reference.decided(
            fields, thresholds, criterion, vocab_size, end_thresholds
        )
    else:
        from exitserve_kernels.exit_check import fused

        whole, confidence, exits = fused.finish(
            summaries, thresholds, criterion, vocab_size, end_thresholds
        )
    top, total, token, *_ = whole.unbind(dim=-1)
    return ExitCheck(token.to(torch.int64), top, total, confidence, exits)
