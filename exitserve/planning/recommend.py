"""Recommends exit layers to train, assuming how many tokens exit at which depth.

Before training that is unknown. The assumption has one number, the share S of tokens that exit at
all, and a curve: the part of them that has exited by a depth. Its points are those of a model of
12 layers that had seen 7.0M tokens, at threshold 0.4 (16, 12 and 12 % of all tokens at a quarter, a
half and three quarters of the depth), joined by straight lines.

The mean time of a step is then a sum over segments that depend only on their two ends, so the best
layers are a shortest path.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from numpy import interp

from exitserve.costs.curves import Curve, StepCosts
from exitserve.costs.devices import LAUNCHES
from exitserve.costs.skipping import segment_seconds, speedup

LEFT_BY = ((0.0, 0.0), (0.25, 0.4), (0.5, 0.7), (0.75, 1.0), (1.0, 1.0))
"""(share of the depth, part of the exits that are at or before it)."""
SHARES = (0.3, 0.5, 0.8)
"""S for which the gains of a recommendation are shown: that model at an agreement of 0.95, the
default assumption, and mostly easy text."""
PLAUSIBLE = 0.8
"""No model is assumed to let more than this share of tokens exit, ..."""
SHALLOWEST = 0.25
"""... nor any token before this share of the depth."""
WORTH = 1.05
"""Where even such exits give less wall speedup than this, exits cannot pay."""
MOST_LAYERS = 4
ONE_MORE = 1.01
"""A further exit layer must shorten a step by this factor."""


def shares_at(layers: Sequence[int], num_layers: int, total: float) -> dict[int, float]:
    """Share of all tokens that exits at each layer (ascending), if `total` could exit at all."""
    left = [0.0, *(total * left_by(layer / num_layers) for layer in layers)]
    return {
        layer: after - before for layer, (before, after) in zip(layers, pairwise(left), strict=True)
    }


def left_by(depth: float) -> float:
    """Part of the exits that happen at or before a share of the depth."""
    return float(interp(depth, [one for one, _ in LEFT_BY], [part for _, part in LEFT_BY]))


def choose_layers(costs: StepCosts, batch: int, total: float, *, compacts: bool) -> tuple[int, ...]:
    """The exit layers with the least mean time of a step; one to four of them.

    Args:
        costs: of the parts.
        batch: B.
        total: S.
        compacts: see `segment_seconds`.
    """
    last = costs.num_layers
    nodes = range(last + 1)
    staying = [1.0 - total * left_by(layer / last) for layer in nodes]

    def edge(start: int, layer: int) -> float:
        after = 0.0 if layer == last else staying[layer]
        return segment_seconds(costs, batch, start, layer, staying[start], after, compacts=compacts)

    edges = {(start, layer): edge(start, layer) for layer in nodes for start in range(layer)}
    # Round by round with one exit more: the best path to each layer, with an exit there.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    found: tuple[float, tuple[int, ...]] | None = None
    fixed = costs.rest(batch) + costs.exits(batch)
    for _ in range(min(MOST_LAYERS, last - 1)):
        best = {
            layer: min(
                (seconds + edges[start, layer], (*path, layer))
                for start, (seconds, path) in best.items()
                if start < layer
            )
            for layer in range(1, last)
            if any(start < layer for start in best)
        }
        seconds, path = min((s + edges[start, last], p) for start, (s, p) in best.items())
        if found is not None and found[0] < (fixed + seconds) * ONE_MORE:
            break
        found = fixed + seconds, path
    return found[1] if found else ()


def verdict(costs: StepCosts, batch: int, *, compacts: bool) -> tuple[float, str | None]:
    """Whether exits can pay, and if not, which cost prevents it.

    Returns:
        The wall speedup if the plausible share of tokens exited at the shallowest plausible layer,
        and why exits cannot pay; None where they can.
    """
    layer = min(costs.num_layers - 1, max(1, round(SHALLOWEST * costs.num_layers)))
    gain = _plausible_gain(costs, batch, layer, compacts=compacts)
    return gain, None if gain >= WORTH else _reason(costs, batch, layer, compacts=compacts)


def _plausible_gain(costs: StepCosts, batch: int, layer: int, *, compacts: bool) -> float:
    return speedup(costs, batch, {layer: PLAUSIBLE}, compacts=compacts)


def _reason(costs: StepCosts, batch: int, layer: int, *, compacts: bool) -> str:
    agreeing = 1.0 - PLAUSIBLE**batch
    if not compacts and _plausible_gain(costs, batch, layer, compacts=True) >= WORTH:
        return (
            f"all {batch} rows run as long as any of them needs a layer, which is so in "
            f"{agreeing:.0%} of the steps; running active rows only would pay"
        )
    nothing = Curve(tuple((rows, 0.0) for rows, _ in costs.check.points))
    if _plausible_gain(replace(costs, check=nothing), batch, layer, compacts=compacts) >= WORTH:
        return (
            f"a check is too expensive: it costs {costs.check_in_layers(batch):.1f} of "
            f"{costs.num_layers} layers, because the vocabulary is large for so small a model"
        )
    no_engine = replace(costs, rest=nothing, exits=nothing)
    if _plausible_gain(no_engine, batch, layer, compacts=compacts) >= WORTH:
        own = (costs.rest(batch) + costs.exits(batch)) / (costs.full(batch) + costs.exits(batch))
        return f"the engine's own work is {own:.0%} of a step, which exits do not shorten"
    if batch > 1:
        work = "launching kernels" if bound_by_launches(costs, batch) else "reading weights"
        return (
            f"{work} is what takes time, and at least one of {batch} rows needs every layer in "
            f"{agreeing:.0%} of the steps"
        )
    return "layers cost too little of a step"


def bound_by_launches(costs: StepCosts, batch: int) -> bool:
    """Whether a layer takes no longer than launching its kernels on a GPU does."""
    return costs.matrices(batch) <= LAUNCHES
