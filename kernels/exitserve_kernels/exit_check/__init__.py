"""The exit check: from states to the likeliest token, its confidence, and who exits.

The head's logits are needed for three numbers a row. The fused form computes them tile by tile
and keeps only running sums, so that the head's weights are read once and no logits are written,
unless a sampler wants those of the rows that exit. README.md beside this file has the formulas.

`exit_check` does it all. Its parts serve an engine: `summarise_slice` (of states and weights) or
`summarise_logits` (of logits that a library made), then `finish` over the slices of all ranks.

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
    "ExitCheck",
    "FinalNorm",
    "Head",
    "check_logits",
    "criterion_of",
    "exit_check",
    "finish",
    "join",
    "summarise_logits",
    "summarise_slice",
]

Criterion = Literal["max_prob", "margin", "entropy"]
CRITERIA: tuple[Criterion, ...] = get_args(Criterion)


def criterion_of(name: str) -> Criterion:
    """The criterion of a name; raises `ValueError` if there is none."""
    for one in CRITERIA:
        if one == name:
            return one
    raise ValueError(f"criterion {name!r} is unknown; allowed: {', '.join(CRITERIA)}.")


class FinalNorm(NamedTuple):
    """A root-mean-square norm to apply to the rows first."""

    gain: Tensor
    """[D]; what the scaled row is multiplied by (for Gemma: one plus its weight)."""
    epsilon: float


class ExitCheck(NamedTuple):
    """What a check says of each row."""

    token: Tensor | None
    """[B] int64, the likeliest token; of equals the first. None where written logits were
    checked: whoever has them can look."""
    top: Tensor
    """[B] float32, its logit."""
    total: Tensor
    """[B] float32, sum of exp(logit - top)."""
    confidence: Tensor
    """[B] float32; NaN where a logit is NaN or infinite."""
    exits: Tensor
    """[B] bool: confidence above the row's threshold; never where it is NaN."""

    @property
    def log_sum_exp(self) -> Tensor:
        """[B] float32, of all logits."""
        return self.top + torch.log(self.total)


def exit_check(
    rows: Tensor,
    weight: Tensor,
    thresholds: Tensor,
    *,
    criterion: Criterion = "max_prob",
    norm: FinalNorm | None = None,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
    scale: float = 1.0,
    vocab_size: int | None = None,
    ends: Tensor | None = None,
    end_thresholds: Tensor | None = None,
    rounded: bool = False,
    implementation: Asked = "auto",
) -> ExitCheck:
    """Checks each row against the head, without writing logits where the fused form runs.

    Args:
        rows: [B, D] states; final-normed already unless `norm` is given.
        weight: [V, D] of the LM head, in the rows' type. Rows beyond `vocab_size` are padding.
        thresholds: [B]; a row exits where its confidence is above its own.
        criterion: `max_prob` is the greatest probability, `margin` its lead over the second,
            `entropy` is 1 - entropy / log(vocab_size).
        norm: the final norm, if the rows have not been through it.
        bias: [V] of the head.
        soft_cap: logits become cap * tanh(logits / cap), before `scale`, as in vLLM.
        scale: multiplies the logits.
        vocab_size: of V, what is vocabulary; all by default.
        ends: [V] bool of tokens that end the text; rows whose top is one of them (or equals one)
            are held to `end_thresholds`.
        end_thresholds: [B]; needed with `ends`.
        rounded: round logits to the rows' type first, as a head that writes them would.
        implementation: `auto`, `triton` or `torch`.

    Raises:
        ValueError: shapes, types or options do not go together.
    """
    head = Head(weight, bias, soft_cap, scale, vocab_size, ends, rounded)
    summary = summarise_slice(rows, head, norm=norm, implementation=implementation)
    size = weight.shape[0] if vocab_size is None else vocab_size
    return finish(
        summary[:, None],
        thresholds,
        criterion=criterion,
        vocab_size=size,
        end_thresholds=end_thresholds if ends is not None else None,
        implementation=implementation,
    )


def summarise_slice(
    rows: Tensor,
    head: Head,
    *,
    norm: FinalNorm | None = None,
    first_token: int = 0,
    logits: Tensor | None = None,
    implementation: Asked = "auto",
) -> Tensor:
    """What one slice of the vocabulary adds to a check: [B, 6] float32, see `reference.FIELDS`.

    Args:
        rows: [B, D].
        head: this rank's slice.
        norm: as in `exit_check`.
        first_token: id of the slice's first token.
        logits: [B, columns of the head] in any floating type and with rows in one piece, takes
            the logits: for whoever samples from them, without a second pass over the head.
        implementation: as in `exit_check`.

    Raises:
        ValueError: shapes or types do not go together.
    """
    reference.check_shapes(rows, head, None if norm is None else norm.gain)
    shape = (rows.shape[0], head.columns)
    if logits is not None and (logits.shape != shape or logits.stride(1) != 1):
        raise ValueError(
            f"logits has shape {tuple(logits.shape)} and strides {logits.stride()}; expected "
            f"{shape}, each row in one piece."
        )
    if choose("exit_check", rows.device, implementation) == "torch" or not rows.shape[0]:
        return reference.summarise(rows, head, norm, first_token, logits)
    from exitserve_kernels.exit_check import fused

    return fused.summarise(rows, head, norm, first_token, logits)


def summarise_logits(
    logits: Tensor, *, criterion: Criterion = "max_prob", end_tokens: Tensor | None = None
) -> Tensor:
    """`summarise_slice` where the logits are written already: [B, 6] float32.

    For heads whose product is a library's: packed for a CPU, quantised. In PyTorch everywhere,
    and only what the criterion needs; the other fields are NaN.

    Args:
        logits: [B, V] of a slice; not changed.
        criterion: as in `exit_check`.
        end_tokens: [K] columns of tokens that end the text; needed where there are thresholds
            for them.

    Raises:
        ValueError: the criterion is unknown.
    """
    _check_criterion(criterion)
    return reference.stacked(reference.of_written(logits, criterion, end_tokens))


def check_logits(
    logits: Tensor,
    thresholds: Tensor,
    *,
    criterion: Criterion = "max_prob",
    end_tokens: Tensor | None = None,
    end_thresholds: Tensor | None = None,
) -> ExitCheck:
    """`exit_check` where the logits [B, V] of the whole vocabulary are written already.

    Arguments as in `summarise_logits` and `finish`.

    Raises:
        ValueError: shapes or options do not go together.
    """
    _check_criterion(criterion)
    _check_thresholds(len(logits), thresholds, end_thresholds)
    fields = reference.of_written(logits, criterion, end_tokens)
    confidence, exits = reference.decided(
        fields, thresholds, criterion, logits.shape[1], end_thresholds
    )
    return ExitCheck(None, fields.top.float(), fields.total, confidence, exits)


def join(summaries: Tensor, *, implementation: Asked = "auto") -> Tensor:
    """One summary [B, 6] of the whole vocabulary from those of its slices, [B, R, 6]."""
    if choose("exit_check", summaries.device, implementation) == "torch" or not len(summaries):
        return reference.join(summaries)
    from exitserve_kernels.exit_check import fused

    return fused.join(summaries)


def finish(
    summaries: Tensor,
    thresholds: Tensor,
    *,
    criterion: Criterion = "max_prob",
    vocab_size: int,
    end_thresholds: Tensor | None = None,
    implementation: Asked = "auto",
) -> ExitCheck:
    """The check from the summaries of all slices.

    Args:
        summaries: [B, R, 6], each rank's `summarise_slice`, in the order of their tokens.
        thresholds: [B].
        criterion: as in `exit_check`.
        vocab_size: of all slices together.
        end_thresholds: [B], for rows whose top ends the text; None if no token does.
        implementation: as in `exit_check`.

    Raises:
        ValueError: shapes or the criterion are wrong.
    """
    _check_criterion(criterion)
    if summaries.dim() != 3 or summaries.shape[-1] != len(FIELDS):
        raise ValueError(
            f"summaries have shape {tuple(summaries.shape)}; expected [B, R, {len(FIELDS)}]."
        )
    _check_thresholds(len(summaries), thresholds, end_thresholds)
    if choose("exit_check", summaries.device, implementation) == "torch" or not len(summaries):
        whole = reference.join(summaries)
        confidence, exits = reference.decided(
            reference.Fields(*whole.unbind(dim=-1)),
            thresholds,
            criterion,
            vocab_size,
            end_thresholds,
        )
    else:
        from exitserve_kernels.exit_check import fused

        whole, confidence, exits = fused.finish(
            summaries, thresholds, criterion, vocab_size, end_thresholds
        )
    top, total, token, *_ = whole.unbind(dim=-1)
    return ExitCheck(token.to(torch.int64), top, total, confidence, exits)


def _check_thresholds(rows: int, thresholds: Tensor, end_thresholds: Tensor | None) -> None:
    for name, given in (("thresholds", thresholds), ("end_thresholds", end_thresholds)):
        if given is not None and given.shape != (rows,):
            raise ValueError(
                f"{name} has shape {tuple(given.shape)}; expected one a row, [{rows}]."
            )


def _check_criterion(criterion: str) -> None:
    if criterion not in CRITERIA:
        raise ValueError(f"criterion {criterion!r} is unknown; allowed: {', '.join(CRITERIA)}.")
