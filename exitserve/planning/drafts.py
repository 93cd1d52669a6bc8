"""Several tokens a step, planned: the table of the report.

Pure Python. B rows, L layers, k drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from exitserve.costs.curves import StepCosts
from exitserve.costs.drafting import (
    ASSUMED_DEPTH,
    MOST_DRAFTS,
    Drafting,
    best_drafts,
    best_text_drafts,
    drafting_speedup,
)

ACCEPTANCES = (0.5, 0.7, 0.9)
"""Of a draft of the first layers, for which gains are shown. Training for the layer decides it."""
DEPTHS = (1 / 8, ASSUMED_DEPTH, 1 / 3)
"""Shares of the depth at which drafts are planned, where a checkpoint declares no exit layer."""


def drafting_table(
    costs: StepCosts, batch_sizes: Sequence[int], layers: Sequence[int], *, alike: bool
) -> list[dict[str, Any]]:
    """The `modes` of the report: by mode, batch, layer, acceptance the drafts that gain most.

    Args:
        costs: of the parts of a step.
        batch_sizes: B.
        layers: at which to draft.
        alike: see `Drafting`.
    """
    table = []
    for mode, batch, layer, acceptance in product(
        ("verify", "defer"), batch_sizes, layers, ACCEPTANCES
    ):
        way = Drafting(exit_layer=layer, drafts=0, checks=mode == "defer", alike=alike)
        way = replace(way, text=best_text_drafts(costs, batch, way, MOST_DRAFTS))
        way = replace(way, drafts=best_drafts(costs, batch, way, acceptance))
        table.append(
            {
                "mode": mode,
                "batch_size": batch,
                "exit_layer": layer,
                "drafts": way.drafts,
                "text_drafts": way.text,
                "acceptance": acceptance,
                "wall_speedup": round(drafting_speedup(costs, batch, way, acceptance), 4),
            }
        )
    return table


def draft_layers(num_layers: int, declared: Sequence[int]) -> tuple[int, ...]:
    """The exit layers at which drafts are planned: those declared, else some low ones."""
    if declared:
        return tuple(declared)
    return tuple(sorted({max(1, round(share * num_layers)) for share in DEPTHS}))
