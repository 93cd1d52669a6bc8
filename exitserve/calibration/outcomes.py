"""What exits give on pieces of text, by the oracle: means over tokens."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from exitserve.agreement import FullDepthPass, run_full_depth, run_with_exits
from exitserve.policy import ExitPolicy
from exitserve.reference import Reference

Source = Literal["text", "generated"]


@dataclass(frozen=True)
class Piece:
    """One request's text: a prompt, and what follows it."""

    token_ids: tuple[int, ...]
    prompt_length: int
    source: Source
    """Held-out text, or a continuation that the model itself wrote."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Means over the decode tokens of one piece."""

    source: Source
    tokens: int
    agreement: float
    """Share of tokens equal to full depth's."""
    depth: float
    checks: float
    """Exit checks per token, each a read of the head."""
    stays: float
    """Share of tokens that ran all layers."""
    nats: float
    full_nats: float
    """Mean negative log-likelihood of the following tokens, with exits and at full depth."""
    ends: int
    """Ends of sequence that exited early."""
    wrong_ends: int
    """Those of them that are not full depth's token."""
    accepted: float = 0.0
    """In mode "defer", the share of tokens that exit or that their exit has right anyway: those
    whose draft would be accepted."""


def run_at_full_depth(
    reference: Reference, piece: Piece, keep: Sequence[int] = ()
) -> FullDepthPass:
    """Runs a piece at full depth, and keeps what its layers gave at the depths `keep`."""
    return run_full_depth(reference, piece.token_ids, piece.prompt_length, keep)


def measure_outcome(
    reference: Reference, piece: Piece, full: FullDepthPass, policy: ExitPolicy
) -> Outcome:
    """Runs a piece with exits, given its full-depth pass."""
    found = run_with_exits(reference, piece.token_ids, piece.prompt_length, policy, full)
    stays = found.depth == reference.parts.num_layers
    early = ~stays & torch.isin(found.token, reference.eos_token_ids)
    return Outcome(
        source=piece.source,
        tokens=len(found.depth),
        agreement=mean(found.agrees),
        depth=mean(found.depth),
        checks=mean(found.checks),
        stays=mean(stays),
        nats=mean(found.nats),
        full_nats=mean(full.nats),
        ends=int(early.sum()),
        wrong_ends=int((early & ~found.agrees).sum()),
    )


def mean(values: Tensor) -> float:
    """Their mean."""
    return float(values.double().mean())


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Means over all decode tokens of several pieces."""

    pieces: int
    tokens: int
    agreement: float
    mean_depth: float
    checks: float
    stays: float
    perplexity: float
    full_perplexity: float
    accepted: float


def summarise(outcomes: Iterable[Outcome]) -> Summary:
    """Means over outcomes, each weighted by its tokens."""
    every = list(outcomes)
    tokens = sum(one.tokens for one in every)

    def weighted_mean(values: Sequence[float]) -> float:
        weighted = zip(values, every, strict=True)
        return sum(value * one.tokens for value, one in weighted) / tokens

    return Summary(
        pieces=len(every),
        tokens=tokens,
        agreement=weighted_mean([one.agreement for one in every]),
        mean_depth=weighted_mean([one.depth for one in every]),
        checks=weighted_mean([one.checks for one in every]),
        stays=weighted_mean([one.stays for one in every]),
        perplexity=math.exp(weighted_mean([one.nats for one in every])),
        full_perplexity=math.exp(weighted_mean([one.full_nats for one in every])),
        accepted=weighted_mean([one.accepted for one in every]),
    )
