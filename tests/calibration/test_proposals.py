"""Proposed thresholds cost least: against brute force, and against every change of one of them."""

from __future__ import annotations

import itertools

import pytest
import torch

from exitserve.calibration import proposals as module
from exitserve.calibration.proposals import FEWEST, Proposal, end_thresholds, propose
from exitserve.calibration.scores import ExitScores
from exitserve.costs.byte_costs import TokenCosts

COSTS = TokenCosts(num_layers=12, layer=1.0, fill=0.1, check=0.8, head=0.8)
TOKENS = 400


def scores_of(layers: tuple[int, ...], seed: int = 0) -> dict[int, ExitScores]:
    """Tokens that agree about as often as their confidence says, the more so the deeper."""
    drawn = torch.Generator().manual_seed(seed)
    found = {}
    for layer in layers:
        confidence = torch.rand(TOKENS, generator=drawn) ** (4.0 / layer)
        agrees = torch.rand(TOKENS, generator=drawn) < 0.4 + 0.6 * confidence
        ends = torch.zeros(TOKENS, dtype=torch.bool)
        found[layer] = ExitScores({"max_prob": confidence}, agrees, ends)
    return found


def total(scores: dict[int, ExitScores], thresholds: dict[int, float], price: float) -> float:
    """What all tokens cost, one after the other, as a share of full depth's and with errors."""
    cost = 0.0
    for token in range(TOKENS):
        depth, checks, wrong = 12, 0, False
        for layer, threshold in sorted(thresholds.items()):
            leaves = scores[layer].confidence["max_prob"][token] > threshold
            checks += 1
            if leaves:
                depth, wrong = layer, not scores[layer].agrees[token]
                break
        cost += COSTS.of(depth, checks, float(depth == 12)) + price * wrong
    return cost


@pytest.mark.parametrize("price", [0.7, 2.0, 6.0])
def test_one_threshold_is_the_best_of_all(price: float) -> None:
    scores = scores_of((6,))
    (found,) = propose(scores, "max_prob", COSTS, prices=[price])
    own = total(scores, dict(found.thresholds), price)
    confidence = scores[6].confidence["max_prob"].sort(descending=True).values
    between = ((confidence[FEWEST:] + confidence[FEWEST - 1 : -1]) / 2).tolist()
    best = min(total(scores, {6: one}, price) for one in between)
    assert own <= best + 1e-6
    assert own < total(scores, {}, price), "else it would not be proposed"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("price", [1.0, 3.0])
def test_no_change_of_one_threshold_is_better(monkeypatch, seed: int, price: float) -> None:
    monkeypatch.setattr(module, "FEWEST", 1)  # else a layer that few tokens reach is left out
    scores = scores_of((3, 6, 9), seed)
    (found,) = propose(scores, "max_prob", COSTS, prices=[price])
    own = total(scores, dict(found.thresholds), price)
    for layer, value in itertools.product((3, 6, 9), (0.2, 0.5, 0.7, 0.8, 0.9, 0.97, None)):
        changed = {k: v for k, v in found.thresholds if k != layer}
        if value is not None:
            changed[layer] = value
        assert own <= total(scores, changed, price) + 1e-6, (layer, value)


def test_ends_of_sequence_leave_early_only_where_enough_were_seen() -> None:
    scores = scores_of((6,))
    own = scores[6]
    ends = torch.zeros(TOKENS, dtype=torch.bool)
    ends[:200] = True
    sure = own.confidence["max_prob"] > 0.8
    known = ExitScores(own.confidence, torch.where(sure, True, own.agrees), ends)
    proposal = Proposal("max_prob", ((6, 0.3),), 1.0)
    few = int((ends & sure).sum())
    strict = end_thresholds({6: known}, proposal, 0.99, fewest=few // 2)[6]
    assert 0.3 < strict < 1.0
    early = ends & (own.confidence["max_prob"] >= strict)
    assert known.agrees[early].double().mean() >= 0.99
    assert end_thresholds({6: known}, proposal, 0.99, fewest=300) == {6: 1.0}
    assert end_thresholds({6: own}, proposal, 0.9999, fewest=few) == {6: 1.0}
