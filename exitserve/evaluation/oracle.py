"""Exit-aware perplexity and agreement on held-out text, exact: teacher-forced frozen-row passes.

Of a window's T tokens the first P are its prompt. The tokens that a server would decode are those
at positions P to T-2: each stops at its own depth and says the next token, which the window holds.

- Perplexity: exp of the mean surprise (nats) at the next token of the text, by the logits of the
  depth at which each token stopped.
- Agreement: the share of them whose greedy next token is full depth's, fed the same text.

In mode "verify" full depth judges every token, so both are full depth's. What exits say are drafts
there, and they are counted as such.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from exitserve.agreement import FullDepthPass, run_full_depth, run_with_exits
from exitserve.evaluation.settings import EvalSetting
from exitserve.reference import Reference
from exitserve.windows import Window


@dataclass
class Tally:
    """Sums over tokens that stopped at one depth."""

    tokens: int = 0
    agreeing: int = 0
    surprise: float = 0.0
    """Negative log-likelihood, in nats."""

    def add(self, agreeing: Tensor, surprise: Tensor) -> None:
        """Adds tokens: bool [N], and float [N]."""
        self.tokens += len(agreeing)
        self.agreeing += int(agreeing.sum())
        self.surprise += float(surprise.sum(dtype=torch.float64))

    @property
    def agreement(self) -> float | None:
        """Share of tokens equal to full depth's; None without tokens."""
        return self.agreeing / self.tokens if self.tokens else None

    @property
    def perplexity(self) -> float | None:
        """None without tokens."""
        return math.exp(self.surprise / self.tokens) if self.tokens else None


@dataclass
class SettingQuality:
    """What the oracle found of one setting."""

    setting: EvalSetting
    by_depth: dict[int, Tally] = field(default_factory=dict)
    """Ascending, exit layers that no token stopped at among them; last full depth."""
    drafted: int = 0
    accepted: int = 0

    @property
    def whole(self) -> Tally:
        """All tokens together."""
        return Tally(
            tokens=sum(tally.tokens for tally in self.by_depth.values()),
            agreeing=sum(tally.agreeing for tally in self.by_depth.values()),
            surprise=sum(tally.surprise for tally in self.by_depth.values()),
        )

    @property
    def mean_depth(self) -> float:
        """Layers that a token waited for."""
        layers = sum(depth * tally.tokens for depth, tally in self.by_depth.items())
        return layers / self.whole.tokens


def measure_quality(
    reference: Reference,
    windows: Sequence[Window],
    prompt_tokens: int,
    settings: Sequence[EvalSetting],
    progress: Callable[[], None],
) -> list[SettingQuality]:
    """Passes every window once for each setting.

    Args:
        reference: the oracle over the checkpoint.
        windows: each of at least `prompt_tokens` + 2 tokens.
        prompt_tokens: P.
        settings: one of full depth among them costs nothing more.
        progress: called after each window.
    """
    depths = (*reference.exit_layers, reference.parts.num_layers)
    found = [SettingQuality(setting, {depth: Tally() for depth in depths}) for setting in settings]
    for window in windows:
        full = run_full_depth(reference, window.token_ids, prompt_tokens)
        for seen in found:
            _add(seen, reference, window.token_ids, prompt_tokens, full)
        progress()
    return found


def _add(
    seen: SettingQuality,
    reference: Reference,
    ids: Sequence[int],
    prompt_tokens: int,
    full: FullDepthPass,
) -> None:
    """Adds one window: those of its decode tokens that another follows."""
    policy, count = seen.setting.policy, len(full.nats)
    last = reference.parts.num_layers
    depth = torch.full((count,), last, device=reference.device)
    agrees, nats = torch.ones_like(depth, dtype=torch.bool), full.nats
    if policy.mode != "off":
        found = run_with_exits(reference, ids, prompt_tokens, policy, full)
        if policy.mode == "verify":
            exited = found.depth[:count] < last
            seen.drafted += int(exited.sum())
            seen.accepted += int((exited & found.agrees[:count]).sum())
        else:
            depth, agrees, nats = found.depth[:count], found.agrees[:count], found.nats
    for layer, tally in seen.by_depth.items():
        here = depth == layer
        tally.add(agrees[here], nats[here])


def depth_entries(seen: SettingQuality) -> list[dict[str, Any]]:
    """`by_depth` of a case: what stopped where, and how good it was."""
    total = seen.whole.tokens
    return [
        {
            "depth": depth,
            "tokens": tally.tokens,
            "share": round(tally.tokens / total, 4),
            "agreement": rounded(tally.agreement),
            "perplexity": rounded(tally.perplexity),
        }
        for depth, tally in seen.by_depth.items()
    ]


def rounded(value: float | None) -> float | None:
    """To four digits, as reports have it."""
    return None if value is None else round(value, 4)
