"""The head of a model, and what it is asked to read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

Classifier = Callable[[Tensor], Tensor]
"""Un-normed hidden states [N, D] to logits [N, V]: final norm, then LM head."""


@dataclass(frozen=True)
class OutputHead:
    """The classifier taken apart: un-normed hidden states [..., D] to logits [..., V].

    The modules' parameters are looked up at each call: under FSDP they are whole only inside the
    model's forward.
    """

    norm: nn.Module
    linear: nn.Module
    soft_cap: float | None = None
    """Bound of the logits, where the architecture has one (Gemma 2)."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Final norm, then linear head, then soft cap: the same as `DecoderParts.classify`."""
        logits: Tensor = self.linear(self.norm(hidden))
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits


@dataclass(frozen=True)
class Reading:
    """M tokens of a layer that the head reads, out of N whose hidden states are at hand.

    The states that count are taken chunk by chunk, so that no copy [M, D] of them is made.
    """

    hidden: Tensor
    """Un-normed [N, D]."""
    labels: Tensor | None = None
    """[M], none of them ignored; None where `cross_entropy` is."""
    cross_entropy: Tensor | None = None
    """Float [M]: the weight of each token's cross-entropy. It gets no gradient. None: not asked."""
    divergence: Tensor | None = None
    """Float [M]: the weight of each token's divergence from the teacher; likewise."""
    rows: Tensor | None = None
    """int64 [M], ascending: which of the N count. None: all of them, and M = N."""

    def __len__(self) -> int:
        """M."""
        return len(self.hidden if self.rows is None else self.rows)


@dataclass(frozen=True)
class Teacher:
    """Whose predictions layers are turned to: KL(softmax(t / T) || softmax(a / T)).

    With t the teacher's logits, a the layer's, T the temperature.
    """

    hidden: Tensor
    """Un-normed [N, D'], of the same N tokens; it gets no gradient."""
    head: OutputHead
    """To logits [N, V]; it gets no gradient."""
    temperature: float = 1.0


class TokenLosses(NamedTuple):
    """Of a reading's M tokens: unweighted, in nats, detached. None for what was not asked."""

    cross_entropy: Tensor | None
    divergence: Tensor | None
