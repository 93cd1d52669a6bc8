"""The cosine and the KL alignment of layers, a token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def cosine_alignment(hidden_states: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """L_sim, appendix C of the aligned-training paper, from L tensors [B, T, D], none zero."""
    rows, tokens, _ = hidden_states[0].shape
    total = torch.zeros(())
    for b in range(rows):
        for t in range(tokens):
            last = hidden_states[-1][b, t].float()
            for weight, states in zip(weights, hidden_states, strict=True):
                state = states[b, t].float()
                cosine = torch.dot(state, last) / (state.norm() * last.norm())
                total = total + weight * (1.0 - cosine)
    return total / (rows * tokens)


def kl_to_last(
    hidden_states: Sequence[Tensor],
    classifier: Callable[[Tensor], Tensor],
    weights: Sequence[float],
    temperature: float = 1.0,
) -> Tensor:
    """The mean over tokens of sum over l of lambda_l * T^2 * KL(p^L || p^l), p^L detached."""
    rows, tokens, _ = hidden_states[0].shape
    total = torch.zeros(())
    for b in range(rows):
        for t in range(tokens):
            last = classifier(hidden_states[-1][b, t][None])[0].float().detach()
            teacher = torch.softmax(last / temperature, dim=0)
            for weight, states in zip(weights[:-1], hidden_states[:-1], strict=True):
                logits = classifier(states[b, t][None])[0].float()
                student = torch.softmax(logits / temperature, dim=0)
                divergence = (teacher * (teacher.log() - student.log())).sum()
                total = total + weight * temperature**2 * divergence
    return total / (rows * tokens)
