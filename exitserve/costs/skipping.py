"""Predicts wall speedup from the costs of a decode step's parts.

B rows decode together; each exits at layer e_i with probability q_i, independently of the others
(S_i is the share of rows still active before e_i):

    full(B)     = rest(B) + L * layer(B) + head(B)       layer = matrices + attention
    compacted   = rest(B) + exits(B) + sum over segments i of n_i * E[layer(A_i)] + E[check(A_i)]
                  + sum over i of (L - e_i) * E[fill(X_i)] + E[head(A_last)]
                  A_i ~ Binomial(B, S_i) active rows, X_i ~ Binomial(B, q_i) rows that exit
    masked      = the same with A_i replaced by B wherever any row is active (with probability
                  1 - (1 - S_i)^B); only `attention` is that of A_i rows, because a frozen row reads
                  no cache; the rest of the fill is done once all rows have exited
    speedup     = full(B) / either

Costs are functions of the number of rows, because reading weights costs the same for one row as
for several, and arithmetic does not. A check that fails is lost; one that passes replaces the head.
*Compacted* is the engine on a CPU, which runs active rows only; *masked* is a CUDA graph, in which
all rows run as long as any of them is active.

Pure Python. B rows, L layers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import cache
from math import comb

from exitserve.costs.curves import Curve, StepCosts

STEPS = 2**40
"""Of [0, 1]: finer than any digit that is printed."""


@cache
def binomial(rows: int, probability: float) -> tuple[float, ...]:
    """Probabilities of 0..rows successes."""
    miss = 1.0 - probability
    return tuple(
        comb(rows, hits) * probability**hits * miss ** (rows - hits) for hits in range(rows + 1)
    )


def _expected(cost: Callable[[int], float], rows: int, probability: float) -> float:
    """Mean of `cost` over the number of rows that take part, each with `probability`."""
    weights = binomial(rows, probability)
    return sum(weight * cost(hits) for hits, weight in enumerate(weights) if weight)


def segment_seconds(
    costs: StepCosts,
    batch: int,
    start: int,
    layer: int,
    staying: float,
    after: float,
    *,
    compacts: bool,
) -> float:
    """Mean seconds of the layers between two exits, of the check after them, and of its fills.

    Args:
        costs: of the parts.
        batch: B.
        start: the exit layer before, 0 at the start.
        layer: the exit layer after them; L for the last segment, which ends in the head.
        staying: share of tokens that run these layers.
        after: share of tokens that go on beyond them.
        compacts: only active rows run, instead of all as long as any is active.
    """

    def seconds(cost: Curve) -> float:
        if compacts:
            return _expected(cost, batch, staying)
        return (1.0 - (1.0 - staying) ** batch) * cost(batch)

    attention = _expected(costs.attention, batch, staying)
    run = (layer - start) * (seconds(costs.matrices) + attention)
    if layer == costs.num_layers:
        return run + seconds(costs.head)
    if compacts:
        filled = _expected(costs.fill, batch, staying - after)
    else:
        # Rows that exited while others ran were filled by the layers themselves.
        filled = ((1.0 - after) ** batch - (1.0 - staying) ** batch) * costs.fill(batch)
    return run + seconds(costs.check) + (costs.num_layers - layer) * filled


def expected_seconds(
    costs: StepCosts, batch: int, shares: Mapping[int, float], *, compacts: bool
) -> float:
    """Mean seconds of a step whose rows are checked at exit layers and exit at random.

    Args:
        costs: of the parts.
        batch: B.
        shares: exit layer to the share of all tokens that exit there; together at most 1.
        compacts: see `segment_seconds`.
    """
    total = costs.rest(batch) + (costs.exits(batch) if shares else 0.0)
    staying, start = 1.0, 0
    for layer in sorted(shares):
        after = max(0.0, staying - shares[layer])
        total += segment_seconds(costs, batch, start, layer, staying, after, compacts=compacts)
        staying, start = after, layer
    end = costs.num_layers
    return total + segment_seconds(costs, batch, start, end, staying, 0.0, compacts=compacts)


def speedup(costs: StepCosts, batch: int, shares: Mapping[int, float], *, compacts: bool) -> float:
    """Wall speedup over full depth; arguments as in `expected_seconds`."""
    return costs.full(batch) / expected_seconds(costs, batch, shares, compacts=compacts)


def break_even_share(costs: StepCosts, batch: int, layer: int, *, compacts: bool) -> float | None:
    """Share of tokens that must exit at the only exit layer for exits to cost nothing.

    Returns:
        Between 0 and 1; None where exits do not pay even if every token exits.
    """

    def gain(step: int) -> float:
        return speedup(costs, batch, {layer: step / STEPS}, compacts=compacts)

    found = bisect_left(range(STEPS + 1), 1.0, key=gain)
    return found / STEPS if found <= STEPS else None
