"""Proposes thresholds: for each price of a wrong token, those with the least expected cost.

With the thresholds of all other layers fixed, the best threshold of one layer is found exactly:
sort tokens by confidence, sum up what each would cost or save by exiting there, and cut where the
running sum is lowest. Layers take turns until nothing changes. This chooses exit layers too: where
no token exits at the best threshold, the layer is not checked at all.

Shapes: N tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exitserve.calibration.scores import ExitScores
from exitserve.costs.byte_costs import TokenCosts
from exitserve.policy import NEVER

PRICES = tuple(1000.0 * 0.5**step for step in range(13))
"""Price of a token that differs from full depth's, in full-depth tokens; the safest first."""
FINE_PRICES = tuple(1000.0 * 0.8**step for step in range(38))
"""Where a choice costs no pass of the oracle."""
BETWEEN = 5
"""Proposals interpolated between two neighbours on both sides of a target."""
SWEEPS = 6
"""Most turns of the layers."""
FEWEST = 20
"""If fewer tokens exit at a layer, it is not worth its checks."""


@dataclass(frozen=True)
class Proposal:
    """Thresholds for one criterion."""

    criterion: str
    thresholds: tuple[tuple[int, float], ...]
    """Exit layer and threshold, ascending; layers left out are not checked."""
    price: float
    """The price of a wrong token for which they cost least."""


def propose(
    scores: Mapping[int, ExitScores],
    criterion: str,
    costs: TokenCosts,
    *,
    prices: Sequence[float] = PRICES,
) -> list[Proposal]:
    """The best thresholds for each price, the safest first, without repeats.

    Args:
        scores: by exit layer, of tokens that ran at full depth.
        criterion: whose confidence is compared with thresholds.
        costs: of the parts of a token.
        prices: of a wrong token, descending.
    """
    found: dict[tuple[tuple[int, float], ...], Proposal] = {}
    for price in prices:
        thresholds = _ThresholdSearch(scores, criterion, costs, price).best_thresholds()
        if thresholds:
            found.setdefault(thresholds, Proposal(criterion, thresholds, price))
    return list(found.values())


def interpolated(first: Proposal, second: Proposal) -> list[Proposal]:
    """`BETWEEN` proposals with thresholds evenly spaced between those of two.

    At a layer that only one of them checks, the other's threshold counts as 1, which never passes.
    """
    one, other = dict(first.thresholds), dict(second.thresholds)
    found = []
    for step in range(1, BETWEEN + 1):
        share = step / (BETWEEN + 1)
        thresholds = tuple(
            (layer, one.get(layer, 1.0) + share * (other.get(layer, 1.0) - one.get(layer, 1.0)))
            for layer in sorted({*one, *other})
        )
        price = first.price * (second.price / first.price) ** share
        found.append(Proposal(first.criterion, thresholds, price))
    return found


def end_thresholds(
    scores: Mapping[int, ExitScores], proposal: Proposal, least: float, fewest: int
) -> dict[int, float]:
    """Thresholds for ends of sequence, by exit layer; 1 (never) where too few were seen.

    Chosen for half of the errors that `least` allows, as a margin for other text.

    Args:
        scores: by exit layer.
        proposal: the thresholds of all other tokens.
        least: share of early ends that must be full depth's.
        fewest: ends of sequence that a layer must have seen.
    """
    found = {}
    for layer, threshold in proposal.thresholds:
        own = scores[layer]
        confidence, order = own.confidence[proposal.criterion][own.ends].sort(descending=True)
        right = own.agrees[own.ends][order].double().cumsum(dim=0)
        count = torch.arange(1, len(confidence) + 1)
        fine = (right / count >= (1.0 + least) / 2.0) & (count >= fewest)
        last = fine.nonzero().flatten()
        found[layer] = max(threshold, float(confidence[last[-1]])) if len(last) else 1.0
    return found


class _ThresholdSearch:
    """Searches the least cost at one price. Costs are shares of a full-depth token's."""

    def __init__(
        self, scores: Mapping[int, ExitScores], criterion: str, costs: TokenCosts, price: float
    ) -> None:
        self._layers = sorted(scores)
        self._confidence = [scores[layer].confidence[criterion] for layer in self._layers]
        # Ends of sequence have thresholds of their own (`end_thresholds`).
        self._may_exit = [~scores[layer].ends for layer in self._layers]
        full = costs.of(costs.num_layers, 0.0, 1.0)
        bare = [costs.of(layer, 0.0, 0.0) for layer in self._layers]
        self._check = costs.of(0, 1.0, 0.0) - costs.of(0, 0.0, 0.0)
        self._stay = full
        self._leave = [
            cost + price * (~scores[layer].agrees).double()
            for layer, cost in zip(self._layers, bare, strict=True)
        ]
        self._thresholds = [NEVER] * len(self._layers)

    def best_thresholds(self) -> tuple[tuple[int, float], ...]:
        """(layer, threshold) of each layer that is checked, ascending."""
        for _ in range(SWEEPS):
            before = list(self._thresholds)
            for index in reversed(range(len(self._layers))):
                self._thresholds[index] = self._best(index)
            if self._thresholds == before:
                break
        chosen = zip(self._layers, self._thresholds, strict=True)
        return tuple((layer, one) for layer, one in chosen if one < NEVER)

    def _leaves(self, index: int) -> Tensor:
        """[N] bool: tokens that exit at layer number `index` if they get there."""
        return (self._confidence[index] > self._thresholds[index]) & self._may_exit[index]

    def _after(self, index: int) -> Tensor:
        """[N] cost of each token if it goes on beyond exit layer number `index`."""
        cost = torch.full_like(self._leave[0], self._stay)
        for later in reversed(range(index + 1, len(self._layers))):
            leaves = self._leaves(later)
            cost = torch.where(leaves, self._leave[later], cost)
            if self._thresholds[later] < NEVER:
                cost = cost + self._check
        return cost

    def _best(self, index: int) -> float:
        """The best threshold of one exit layer, the others fixed."""
        arrives = torch.ones_like(self._may_exit[0])
        for earlier in range(index):
            arrives &= ~self._leaves(earlier)
        able = arrives & self._may_exit[index]
        if able.sum() < FEWEST:
            return NEVER
        gain = self._leave[index][able] - self._after(index)[able]
        confidence, order = self._confidence[index][able].sort(descending=True)
        total = gain[order].cumsum(dim=0) + self._check * arrives.sum()
        # A threshold cannot separate tokens of equal confidence.
        cut = torch.ones_like(total, dtype=torch.bool)
        cut[:-1] = confidence[1:] < confidence[:-1]
        total = torch.where(cut, total, torch.inf)
        best = int(total.argmin())
        if total[best] >= 0 or best + 1 < FEWEST:
            return NEVER
        following = confidence[best + 1] if best + 1 < len(confidence) else torch.tensor(0.0)
        # Rounding may put a confidence a little below 0, which is no threshold.
        return max(0.0, float((confidence[best] + following) / 2))
