"""Compares exits with full depth on a text, token by token: exact, teacher-forced passes.

Of a text's T tokens the first P are a prompt. A server would decode the other N = T - P: each stops
at its own depth and predicts the next token, which is in the text for all but the last.

Needs torch; the passes are the oracle's (`exitserve.reference`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, no_grad, tensor
from torch.nn.functional import cross_entropy

from exitserve.checkpoint.decoder import capture_hidden, capture_outputs, replayed
from exitserve.policy import NEVER, ExitPolicy
from exitserve.reference import Reference


@dataclass(frozen=True, kw_only=True)
class FullDepthPass:
    """Full depth on each decode token."""

    token: Tensor
    """[N] the greedy next token."""
    nats: Tensor
    """[N - 1] negative log-likelihood of the token that follows."""
    outputs: Mapping[int, Any]
    """What layers gave, by depth: a pass with exits need not repeat those before its first check.
    Only of the depths that were asked for."""


@dataclass(frozen=True, kw_only=True)
class PassWithExits:
    """Exits on each decode token, compared with full depth."""

    depth: Tensor
    """[N] layers that each token ran."""
    checks: Tensor
    """[N] exit checks, each a read of the exit rows."""
    token: Tensor
    """[N] the greedy next token that is sent from that depth."""
    agrees: Tensor
    """[N] bool: that token is also full depth's."""
    nats: Tensor
    """[N - 1] negative log-likelihood of the token that follows, by the whole head's logits at that
    depth, from which requests sample."""


def run_full_depth(
    reference: Reference, token_ids: Sequence[int], prompt_length: int, keep: Sequence[int] = ()
) -> FullDepthPass:
    """Runs a text at full depth, and keeps what its layers gave at the depths `keep`."""
    with capture_outputs(reference.parts.layers, keep) as outputs:
        trace = reference.trace(token_ids, prompt_length, ExitPolicy.off())
    logits = trace.logits[prompt_length:]
    return FullDepthPass(
        token=logits.argmax(dim=-1),
        nats=following_nats(logits, token_ids, prompt_length),
        outputs=outputs,
    )


def run_with_exits(
    reference: Reference,
    token_ids: Sequence[int],
    prompt_length: int,
    policy: ExitPolicy,
    full: FullDepthPass,
) -> PassWithExits:
    """Runs a text with exits, given its full-depth pass."""
    checked = [depth for depth in reference.exit_layers if policy.thresholds_at(depth)[0] < NEVER]
    first = min(checked, default=0)
    skipped = first if first in full.outputs else 0
    with replayed(reference.parts.layers, skipped, full.outputs.get(first)):
        trace = reference.trace(token_ids, prompt_length, policy)
    logits, token = trace.logits[prompt_length:], trace.token[prompt_length:]
    return PassWithExits(
        depth=trace.depth[prompt_length:],
        checks=trace.checks[prompt_length:],
        token=token,
        agrees=token == full.token,
        nats=following_nats(logits, token_ids, prompt_length),
    )


@no_grad()
def exit_states(
    reference: Reference, token_ids: Sequence[int], prompt_length: int
) -> tuple[dict[int, Tensor], Tensor]:
    """Normed states [N, D] of a text's decode tokens at each exit, and those of full depth [N, D].

    One pass at full depth, so each exit has exact keys and values.
    """
    parts = reference.parts
    depths = [*reference.exit_layers, parts.num_layers]
    ids = tensor([list(token_ids)], device=reference.device)
    with capture_hidden(parts.layers, depths) as hidden:
        reference.model.base_model(input_ids=ids, use_cache=False)
    decode = {depth: hidden[depth][0, prompt_length:] for depth in depths}
    final = parts.norm(decode[parts.num_layers])
    return {layer: parts.norm(decode[layer]) for layer in reference.exit_layers}, final


def following_nats(logits: Tensor, token_ids: Sequence[int], prompt_length: int) -> Tensor:
    """[N - 1] negative log-likelihood of the following tokens under decode logits [N, V]."""
    following = tensor(token_ids[prompt_length + 1 :], device=logits.device)
    return cross_entropy(logits[:-1].float(), following, reduction="none")
