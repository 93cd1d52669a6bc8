"""A plan's rows in the masked loop, and what becomes of any check that a plan asked for.

Shapes: T tokens, B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from exitserve.engine.host.rows import HostRows
from exitserve.engine.host.step_plan import Candidate, StepPlan
from exitserve.engine.layers.exit_head import ExitHead


def settle(
    rows: HostRows,
    plan: StepPlan,
    layer: int,
    due: Sequence[Candidate],
    leaving: Sequence[bool],
    logits_of: Callable[[list[bool]], Tensor],
) -> list[int]:
    """Notes the outcome of a check.

    Args:
        rows: the engine's exit state.
        plan: takes depths and logits.
        layer: the exit layer.
        due: [N] what was to be checked.
        leaving: whether those passed that are not sure to exit whatever their confidence.
        logits_of: gives the logits of those of them that leave.

    Returns:
        Indices within `due` of those that exit.
    """
    asked = [index for index, one in enumerate(due) if not one.is_sure(layer)]
    checked = [due[index] for index in asked]
    forced = rows.force_checks(checked, layer, plan)
    outcome = list(leaving) if forced is None else forced
    plan.decided(checked, layer, outcome)
    gone = [one.row for one, leaves in zip(checked, outcome, strict=True) if leaves]
    if gone:
        plan.keep_logits(gone, logits_of(outcome))
    stays = {index for index, leaves in zip(asked, outcome, strict=True) if not leaves}
    passed = [index for index in range(len(due)) if index not in stays]
    plan.depth.update((due[index].row, layer) for index in passed)
    rows.recorder.checked(layer, len(due), len(passed), head_passes=bool(asked))
    return passed


class HostMaskedRows:
    """See `exitserve.engine.layers.masked_loop.MaskedRows`; the host decides."""

    padding: Tensor | None = None
    known_depth: Tensor | None

    def __init__(
        self, rows: HostRows, plan: StepPlan, head: ExitHead, device: torch.device
    ) -> None:
        self._rows, self._plan, self._head = rows, plan, head
        self._due: list[Candidate] = []
        self.places = torch.tensor(plan.row_ends, device=device) - 1
        self.freezes = torch.tensor(
            [row not in plan.pending for row in range(len(plan.row_ends))], device=device
        )
        known = plan.known_depth
        self.known_depth = None if known is None else known.to(device)

    def due(self, layer: int, running: Tensor) -> Tensor:
        """The rows that the plan names."""
        self._due = self._plan.due(layer)
        return self._mask([one.row for one in self._due])

    def thresholds(self, layer: int) -> tuple[Tensor, Tensor]:
        """Those of the rows that are due; 0 for all others."""
        found = torch.zeros(2, len(self.places))
        own = self._plan.thresholds(self._due, layer)
        found[:, [one.row for one in self._due]] = torch.stack(own)
        return found[0], found[1]

    def saw(self, layer: int, due: Tensor, passed: Tensor, logits: Tensor) -> Tensor:
        """Settles the check."""
        outcome, checked = passed.tolist(), due.tolist()
        self._due = [one for one in self._due if checked[one.row]]
        asked = [one.row for one in self._due if not one.is_sure(layer)]

        def logits_of(leaving: list[bool]) -> Tensor:
            gone = {row for row, leaves in zip(asked, leaving, strict=True) if leaves}
            return self._head.logits_of(logits, [row in gone for row in range(len(logits))])

        leaving = [outcome[row] for row in asked]
        exits = settle(self._rows, self._plan, layer, self._due, leaving, logits_of)
        rows = [self._due[index].row for index in exits]
        freezing = [one for one in rows if one not in self._plan.pending]
        self._rows.recorder.froze(len(freezing))
        return self._mask(rows)

    def ran(self, layers: int) -> None:
        """Counts them."""
        self._rows.recorder.ran(layers)

    def _mask(self, rows: Sequence[int]) -> Tensor:
        mask = torch.zeros(len(self.places), dtype=torch.bool)
        mask[list(rows)] = True
        return mask.to(self.places.device)
