"""Several tokens a step, planned: the table of the report.

Pure Python. B rows, L layers, k drafts.
"""

from dataclasses import replace
from typing import Any

from exitserve.costs.curves import StepCosts
from exitserve.costs.drafting import Drafting, best_drafts, best_text_drafts, drafting_speedup


def best_drafting(
    costs: StepCosts,
    batch: int,
    layer: int,
    acceptance: float,
    *,
    checks: bool = False,
    alike: bool,
) -> dict[str, Any]:
    """An entry of the report's `modes`: the drafts of a layer that gain most, for B = `batch`; see
    `Drafting`.
    """
    way = Drafting(exit_layer=layer, drafts=0, checks=checks, alike=alike)
    way = replace(way, text=best_text_drafts(costs, batch, way))
    way = replace(way, drafts=best_drafts(costs, batch, way, acceptance))
    return {
        "mode": "defer" if checks else "verify",
        "batch_size": batch,
        "exit_layer": layer,
        "drafts": way.drafts,
        "text_drafts": way.text,
        "acceptance": round(acceptance, 4),
        "wall_speedup": round(drafting_speedup(costs, batch, way, acceptance), 4),
    }
