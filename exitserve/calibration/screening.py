"""Fits the screens of a checkpoint, and measures what they miss (`exitserve.screens`).

A screen learns the confidence itself, so that one serves every threshold. What its score means at
a threshold, the chance that a check passes, is fitted to other text than the screen (Platt 1999).

Shapes: N tokens, D hidden, H inner width of a screen, K knots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from exitserve.agreement import exit_states
from exitserve.calibration.outcomes import Piece
from exitserve.calibration.scores import ExitScores
from exitserve.reference import Reference
from exitserve.screens import KNOTS, Screen, Screens
from exitserve_kernels.exit_check import CRITERIA, check_logits

MOST_TOKENS = 30_000
"""Tokens that screens are fitted to, at most."""
SHARE = 2 / 3
"""Of them, for the network; the rest tells what its score means."""
STEPS, BATCH, RATE, DECAY = 600, 512, 3e-3, 1e-4
"""Of the network's training, by AdamW."""
FEWEST = 8
"""If fewer tokens pass at a threshold, or fail, its score means the same everywhere."""
LEVELS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Thresholds for which it is reported what screens let through."""


@torch.no_grad()
def fit_screens(
    reference: Reference, pieces: Sequence[Piece], advance: Callable[[], None]
) -> dict[str, dict[int, Screen]]:
    """Fits screens for every criterion and exit layer.

    Args:
        reference: the oracle.
        pieces: text used for nothing else.
        advance: called after each piece.
    """
    states: dict[int, list[Tensor]] = {layer: [] for layer in reference.exit_layers}
    said: dict[tuple[str, int], list[Tensor]] = {}
    tokens = 0
    for piece in pieces:
        if tokens < MOST_TOKENS:
            normed, final = exit_states(reference, piece.token_ids, piece.prompt_length)
            tokens += len(final)
            for layer, rows in normed.items():
                states[layer].append(rows.float())
                logits = reference.parts.classify_normed(rows)
                never = torch.full((len(rows),), torch.inf, device=rows.device)
                for name in CRITERIA:
                    found = check_logits(logits, never, criterion=name)
                    said.setdefault((str(name), layer), []).append(found.confidence)
        advance()
    joined = {layer: torch.cat(rows) for layer, rows in states.items()}
    return {
        str(name): {
            layer: fit_screen(joined[layer], torch.cat(said[str(name), layer]))
            for layer in reference.exit_layers
        }
        for name in CRITERIA
    }


def fit_screen(states: Tensor, confidence: Tensor) -> Screen:
    """Fits a screen to normed states [N, D] and the confidence that the head has there [N]."""
    count = max(1, round(SHARE * len(states)))
    network = _fit_network(states[:count], confidence[:count])
    nothing = torch.zeros(len(KNOTS))
    score = Screen(*network, nothing, nothing).score(states[count:]).cpu().double()
    passes = confidence[count:].cpu()
    meanings = [_meaning(score, passes > knot) for knot in KNOTS]
    slope, offset = torch.tensor(meanings, dtype=torch.float32).T.contiguous()
    device = states.device
    return Screen(*network, slope.to(device), offset.to(device))


@torch.enable_grad()
def _fit_network(states: Tensor, confidence: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The two layers' weights and biases, fitted to the confidence by cross-entropy."""
    size, device = states.shape[1], states.device
    width = max(8, size // 8)
    centre, scale = states.mean(dim=0), states.std(dim=0) + 1e-6
    drawn = torch.Generator().manual_seed(0)
    inner = (torch.randn(width, size, generator=drawn) / size**0.5).to(device)
    outer = (torch.randn(width, generator=drawn) / width**0.5).to(device)
    weights = [inner, torch.zeros(width, device=device), outer, torch.zeros(1, device=device)]
    for one in weights:
        one.requires_grad_()
    solver = torch.optim.AdamW(weights, lr=RATE, weight_decay=DECAY)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(solver, STEPS)
    target = confidence.clamp(0.0, 1.0)
    for _ in range(STEPS):
        picked = torch.randint(len(states), (BATCH,), generator=drawn).to(device)
        rows = (states[picked] - centre) / scale
        score = torch.relu(rows @ weights[0].T + weights[1]) @ weights[2] + weights[3]
        loss = binary_cross_entropy_with_logits(score, target[picked])
        solver.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # PyTorch's
        solver.step()
        falling.step()
    inner, inner_bias, outer, outer_bias = (one.detach() for one in weights)
    inner = inner / scale
    return inner, inner_bias - inner @ centre, outer, outer_bias


@torch.enable_grad()
def _meaning(score: Tensor, passes: Tensor) -> tuple[float, float]:
    """Slope and offset of the logistic regression of `passes` [N] on `score` [N], float64."""
    count, total = int(passes.sum()), len(passes)
    if min(count, total - count) < FEWEST:
        share = (count + 0.5) / (total + 1.0)
        return 0.0, math.log(share / (1.0 - share))
    both = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([both], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        found = binary_cross_entropy_with_logits(both[0] * score + both[1], passes.double())
        found.backward()  # type: ignore[no-untyped-call]  # PyTorch's
        return found

    solver.step(loss)  # type: ignore[no-untyped-call]  # PyTorch's
    slope, offset = both.detach().tolist()
    return slope, offset


def screening(
    scores: Mapping[int, ExitScores],
    screens: Screens,
    criterion: str,
    break_even: Mapping[int, float],
) -> list[dict[str, Any]]:
    """What screens let through, by exit layer and threshold, on tokens that they never saw.

    `passes`, `opened`: shares of all tokens at the exit whose check would pass, and is made.
    `recall`: of those that would pass, the share that is checked. `chance`: the mean chance to pass
    that the screen gave, beside `passes`.
    """
    found = []
    for layer, screen in screens.items():
        score, confidence = scores[layer].screen[criterion], scores[layer].confidence[criterion]
        for level in LEVELS:
            passes = confidence > level
            opened = score > screen.least_score(level, break_even[layer])
            recall = float((passes & opened).sum() / passes.sum()) if passes.any() else None
            found.append(
                {
                    "exit_layer": layer,
                    "threshold": level,
                    "break_even": round(break_even[layer], 4),
                    "passes": round(float(passes.double().mean()), 4),
                    "opened": round(float(opened.double().mean()), 4),
                    "recall": None if recall is None else round(recall, 4),
                    "chance": round(float(screen.chance(score, level).double().mean()), 4),
                }
            )
    return found
