"""Several tokens a step, planned: the table of the report.

Pure Python. B rows, L layers, k drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from exitserve.costs.curves import StepCosts
from exitserve.costs.drafting import MOST_DRAFTS, Drafting, drafting_speedup

ACCEPTANCES = (0.7, 0.8, 0.9)
"""Of a draft, for which gains are shown. Training for the draft layer decides it."""
ASSUMED = 0.8
"""The one that advice goes by."""
DEPTHS = (1 / 16, 1 / 8, 1 / 4)
"""Shares of the depth at which drafts are planned, where a checkpoint declares no exit layer."""


def drafting_table(
    costs: StepCosts,
    batch_sizes: Sequence[int],
    layers: Sequence[int],
) -> list[dict[str, Any]]:
    """The `modes` of the report: wall speedup by mode, batch, layer, drafts, acceptance.

    Args:
        costs: of the parts of a step.
        batch_sizes: B.
        layers: at which to draft.
    """
    table = []
    for mode, batch, layer, drafts, acceptance in product(
        ("verify", "defer"), batch_sizes, layers, range(1, MOST_DRAFTS + 1), ACCEPTANCES
    ):
        way = Drafting(exit_layer=layer, drafts=drafts, checks=mode == "defer")
        gain = drafting_speedup(costs, batch, way, acceptance)
        table.append(
            {
                "mode": mode,
                "batch_size": batch,
                "exit_layer": layer,
                "drafts": drafts,
                "acceptance": acceptance,
                "wall_speedup": round(gain, 4),
            }
        )
    return table


def draft_layers(num_layers: int, declared: Sequence[int]) -> tuple[int, ...]:
    """The exit layers at which drafts are planned: those declared, else some low ones."""
    if declared:
        return tuple(declared)
    return tuple(sorted({max(1, round(share * num_layers)) for share in DEPTHS}))
