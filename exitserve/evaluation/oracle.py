"""Exact perplexity and agreement on held-out text with exits: teacher-forced frozen-row passes.

Of a window's T tokens the first P are its prompt. Measured are those at positions P to T-2, which a
server would decode: each stops at its own depth and predicts the next token, which the text has.

- Perplexity: exp of the mean negative log-likelihood (nats) of the next token, by the logits of
  the depth at which each token stopped.
- Agreement: the share of tokens whose greedy next token is that of full depth on the same text.

In mode "verify" full depth decides every token, so both are those of full depth.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from exitserve.agreement import FullDepthPass, run_full_depth, run_with_exits
from exitserve.policy import ExitPolicy
from exitserve.reference import Reference
from exitserve.reporting.report import rounded
from exitserve.windows import Window


@dataclass
class Tally:
    """Sums over tokens that stopped at one depth."""

    tokens: int = 0
    agreeing: int = 0
    nats: float = 0.0
    """Negative log-likelihood, in nats."""

    def add(self, agreeing: Tensor, nats: Tensor) -> None:
        """Adds N tokens: whether each agrees (bool), and its negative log-likelihood."""
        self.tokens += len(agreeing)
        self.agreeing += int(agreeing.sum())
        self.nats += float(nats.sum(dtype=torch.float64))

    @property
    def agreement(self) -> float | None:
        """Share of tokens equal to full depth's; None without tokens."""
        return self.agreeing / self.tokens if self.tokens else None

    @property
    def perplexity(self) -> float | None:
        """None without tokens."""
        return math.exp(self.nats / self.tokens) if self.tokens else None


@dataclass
class SettingQuality:
    """Quality of one setting."""

    policy: ExitPolicy
    by_depth: dict[int, Tally] = field(default_factory=dict)
    """All exit layers, ascending, then full depth; some may have no tokens."""

    @property
    def whole(self) -> Tally:
        """All tokens together."""
        return Tally(
            tokens=sum(tally.tokens for tally in self.by_depth.values()),
            agreeing=sum(tally.agreeing for tally in self.by_depth.values()),
            nats=sum(tally.nats for tally in self.by_depth.values()),
        )

    @property
    def mean_depth(self) -> float:
        """Where tokens stopped, on average, in layers."""
        layers = sum(depth * tally.tokens for depth, tally in self.by_depth.items())
        return layers / self.whole.tokens


def measure_quality(
    reference: Reference,
    windows: Sequence[Window],
    prompt_tokens: int,
    policies: Sequence[ExitPolicy],
    progress: Callable[[], None],
) -> list[SettingQuality]:
    """Runs every window, of at least `prompt_tokens` + 2 tokens, once for each policy."""
    depths = (*reference.exit_layers, reference.parts.num_layers)
    found = [SettingQuality(one, {depth: Tally() for depth in depths}) for one in policies]
    for window in windows:
        full = run_full_depth(reference, window.token_ids, prompt_tokens)
        for quality in found:
            _add_window(quality, reference, window.token_ids, prompt_tokens, full)
        progress()
    return found


def _add_window(
    quality: SettingQuality,
    reference: Reference,
    ids: Sequence[int],
    prompt_tokens: int,
    full: FullDepthPass,
) -> None:
    """Adds the decode tokens of a window, but for the last, which nothing follows."""
    policy, count = quality.policy, len(full.nats)
    last = reference.parts.num_layers
    depth = torch.full((count,), last, device=reference.device)
    agrees, nats = torch.ones_like(depth, dtype=torch.bool), full.nats
    if policy.mode not in ("off", "verify"):
        found = run_with_exits(reference, ids, prompt_tokens, policy, full)
        depth, agrees, nats = found.depth[:count], found.agrees[:count], found.nats
    for layer, tally in quality.by_depth.items():
        here = depth == layer
        tally.add(agrees[here], nats[here])


def depth_entries(quality: SettingQuality) -> list[dict[str, Any]]:
    """`by_depth` of a case: how many tokens stopped at each depth, and their quality."""
    total = quality.whole.tokens
    return [
        {
            "depth": depth,
            "tokens": tally.tokens,
            "share": round(tally.tokens / total, 4),
            "agreement": rounded(tally.agreement),
            "perplexity": rounded(tally.perplexity),
        }
        for depth, tally in quality.by_depth.items()
    ]
