"""What exits make of a text beside full depth, token by token: exact, teacher-forced passes.

Of a text's T tokens the first P are a prompt. A server would decode the others, N = T - P: each
stops at its own depth and says the next token, which the text holds for all but the last.

Needs torch; the passes are the oracle's (`exitserve.reference`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, tensor
from torch.nn.functional import cross_entropy

from exitserve.policy import ExitPolicy
from exitserve.reference import Reference


@dataclass(frozen=True, kw_only=True)
class FullDepthPass:
    """What full depth says after each decode token."""

    token: Tensor
    """[N] its greedy token."""
    nats: Tensor
    """[N - 1] its surprise at the tokens that follow."""


@dataclass(frozen=True, kw_only=True)
class ExitPass:
    """What was said with exits, and what full depth thinks of it."""

    depth: Tensor
    """[N] layers that each token ran."""
    checks: Tensor
    """[N] reads of the head for a check."""
    token: Tensor
    """[N] the greedy token by the logits of its depth."""
    agrees: Tensor
    """[N] bool: it is full depth's, given the same text."""
    nats: Tensor
    """[N - 1] surprise at the tokens that follow, by the logits of its depth."""


def run_full_depth(
    reference: Reference, token_ids: Sequence[int], prompt_length: int
) -> FullDepthPass:
    """Runs a text at full depth."""
    trace = reference.trace(token_ids, prompt_length, ExitPolicy.off())
    logits = trace.logits[prompt_length:]
    return FullDepthPass(token=logits.argmax(dim=-1), nats=_nats(logits, token_ids, prompt_length))


def run_with_exits(
    reference: Reference,
    token_ids: Sequence[int],
    prompt_length: int,
    policy: ExitPolicy,
    full: FullDepthPass,
) -> ExitPass:
    """Runs a text with exits; `full` is what full depth says of the same text."""
    trace = reference.trace(token_ids, prompt_length, policy)
    logits = trace.logits[prompt_length:]
    token = logits.argmax(dim=-1)
    return ExitPass(
        depth=trace.depth[prompt_length:],
        checks=trace.checks[prompt_length:],
        token=token,
        agrees=token == full.token,
        nats=_nats(logits, token_ids, prompt_length),
    )


def _nats(logits: Tensor, token_ids: Sequence[int], prompt_length: int) -> Tensor:
    """[N - 1] surprise of decode logits [N, V] at the tokens that follow them."""
    following = tensor(token_ids[prompt_length + 1 :], device=logits.device)
    return cross_entropy(logits[:-1], following, reduction="none")
