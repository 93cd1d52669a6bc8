"""Times the parts of a decode step of the model that is loaded, once, before it serves.

Attention is left out, since there is no cache yet: with long contexts layers are dearer, and exits
gain more, than this says. vLLM's own work in a step, and ours around exits, are constants
(`exitserve.step_costs.timing`).

Shapes: N rows, D hidden.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise

from torch import Tensor

from exitserve.engine.layers.exit_head import ExitHead
from exitserve.step_costs.curves import Curve, StepCosts
from exitserve.step_costs.timing import ENGINE_SECONDS, EXITS_SECONDS

ROWS = (1, 4, 16)
"""Numbers of rows for which parts are timed."""
ROUNDS = 5
"""The least time of these counts: others can only add to it."""
FILL = 0.1
"""What the keys and values of a layer cost, about, as a share of the layer."""


def own_costs(layers: Callable[[int], Tensor], num_layers: int, head: ExitHead) -> StepCosts:
    """What the parts of a step cost.

    Args:
        layers: runs all layers for so many rows; returns their normed states [N, D].
        num_layers: L.
        head: of the exit checks.
    """
    parts = [_least(layers, head, count) for count in ROWS]
    matrices, heads, checks = (
        Curve(tuple(zip(ROWS, one, strict=True))) for one in zip(*parts, strict=True)
    )
    per_layer = Curve(tuple((count, seconds / num_layers) for count, seconds in matrices.points))
    return StepCosts(
        num_layers=num_layers,
        matrices=per_layer,
        attention=_line(0.0, 0.0),
        fill=Curve(tuple((count, FILL * seconds) for count, seconds in per_layer.points)),
        check=checks,
        head=heads,
        rest=_line(*ENGINE_SECONDS),
        exits=_line(*EXITS_SECONDS),
    )


def _least(
    layers: Callable[[int], Tensor], head: ExitHead, count: int
) -> tuple[float, float, float]:
    """Least seconds of all layers, of the head, and of a check, for so many rows."""
    never = [(math.inf, math.inf)] * count
    found = []
    for _ in range(ROUNDS):
        times = [time.perf_counter()]
        normed = layers(count)
        times.append(time.perf_counter())
        head.own_logits(normed)
        times.append(time.perf_counter())
        head.decide(normed, never)
        times.append(time.perf_counter())
        found.append([after - before for before, after in pairwise(times)])
    run, read, check = (min(one) for one in zip(*found, strict=True))
    return run, read, check


def _line(first: float, more: float) -> Curve:
    return Curve(tuple((count, first + (count - 1) * more) for count in ROWS))
