"""Confidence and agreement at every exit layer, for tokens that ran at full depth; fits gates.

One full-depth pass over a piece shows all exits at once, with exact keys and values. Proposals are
made from that. What thresholds give when served is measured by the oracle (`outcomes`).

Shapes: N tokens, E exit layers, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exitserve.agreement import exit_states
from exitserve.calibration.outcomes import Piece
from exitserve.gates import Gate
from exitserve.reference import Reference
from exitserve_kernels.exit_check import CRITERIA, check_logits

GATE_TOKENS = 30_000
"""Tokens a gate is fitted to, at most: its D weights need no more."""
GATE_DECAY = 1e-3
"""Weight of the squared-weights penalty of a gate, on standardised states."""


@dataclass(frozen=True)
class ExitScores:
    """What one exit layer predicts for N tokens."""

    confidence: Mapping[str, Tensor]
    """[N] float32 for each criterion."""
    agrees: Tensor
    """[N] bool: its greedy token is full depth's."""
    ends: Tensor
    """[N] bool: its greedy token ends the sequence."""


@torch.no_grad()
def exit_scores(
    reference: Reference,
    pieces: Iterable[Piece],
    gates: Mapping[int, Gate],
    advance: Callable[[], None],
) -> dict[int, ExitScores]:
    """Scores of all decode tokens of `pieces` under every criterion, by exit layer.

    Args:
        reference: the oracle.
        pieces: the text.
        gates: by exit layer; where empty, there is no criterion "gate".
        advance: called after each piece.
    """
    found: dict[int, list[ExitScores]] = {layer: [] for layer in reference.exit_layers}
    for piece in pieces:
        states, token = exit_states(reference, piece.token_ids, piece.prompt_length)
        for layer, normed in states.items():
            logits = reference.parts.classify_normed(normed)
            never = torch.full((len(logits),), torch.inf, device=logits.device)
            scores = {one: check_logits(logits, never, criterion=one) for one in CRITERIA}
            confidence = {str(name): score.confidence for name, score in scores.items()}
            if gates:
                confidence["gate"] = gates[layer].confidence(normed)
            greedy = logits.argmax(dim=-1)
            ends = torch.isin(greedy, reference.eos_token_ids)
            found[layer].append(ExitScores(confidence, greedy == token, ends))
        advance()
    return {layer: _joined(scores) for layer, scores in found.items()}


def _joined(scores: Sequence[ExitScores]) -> ExitScores:
    return ExitScores(
        {
            name: torch.cat([one.confidence[name] for one in scores]).cpu()
            for name in scores[0].confidence
        },
        torch.cat([one.agrees for one in scores]).cpu(),
        torch.cat([one.ends for one in scores]).cpu(),
    )


def fit_gates(
    reference: Reference, pieces: Sequence[Piece], advance: Callable[[], None]
) -> dict[int, Gate]:
    """Fits a gate for each exit layer, to predict whether its greedy token is full depth's.

    Args:
        reference: the oracle.
        pieces: text used for nothing else.
        advance: called after each piece.
    """
    states: dict[int, list[Tensor]] = {layer: [] for layer in reference.exit_layers}
    labels: dict[int, list[Tensor]] = {layer: [] for layer in reference.exit_layers}
    tokens = 0
    for piece in pieces:
        if tokens < GATE_TOKENS:
            normed, token = exit_states(reference, piece.token_ids, piece.prompt_length)
            tokens += len(token)
            for layer, rows in normed.items():
                with torch.no_grad():
                    greedy = reference.parts.classify_normed(rows).argmax(dim=-1)
                states[layer].append(rows.float())
                labels[layer].append(greedy == token)
        advance()
    return {
        layer: fit_gate(torch.cat(states[layer]), torch.cat(labels[layer]))
        for layer in reference.exit_layers
    }


def fit_gate(states: Tensor, agrees: Tensor) -> Gate:
    """Logistic regression of `agrees` [N] on normed states [N, D], by L-BFGS."""
    states = states.detach()
    centre, scale = states.mean(dim=0), states.std(dim=0) + 1e-6
    rows, labels = (states - centre) / scale, agrees.float()
    weight = torch.zeros(rows.shape[1], device=rows.device, requires_grad=True)
    bias = torch.zeros((), device=rows.device, requires_grad=True)
    solver = torch.optim.LBFGS([weight, bias], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        logits = rows @ weight + bias
        fit = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        whole = fit + GATE_DECAY * weight.square().sum()
        whole.backward()  # type: ignore[no-untyped-call]  # PyTorch's
        return whole

    solver.step(loss)  # type: ignore[no-untyped-call]  # PyTorch's
    own = (weight / scale).detach()
    return Gate(own, bias.detach() - own @ centre)
