"""What one forward pass may do, and what came of it.

Only the token that a row is about to generate from can exit: earlier tokens of a chunk are
prompt, or, after a preemption, tokens whose depth is known from the first time.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from exitserve.confidence import exit_mask
from exitserve.engine.pending import Pending, Tokens
from exitserve.policy import ALWAYS, ExitPolicy, ExitRules
from exitserve.schedule import CheckSchedule


@dataclass(frozen=True)
class Candidate:
    """A row whose token of this pass may exit."""

    row: int
    policy: ExitPolicy
    schedule: CheckSchedule
    pending: Pending | None = None
    """Tokens of the request whose deeper layers are still to run; None outside mode "defer"."""

    def is_sure(self, layer: int) -> bool:
        """Whether the row exits at `layer` whatever its confidence."""
        return self.policy.thresholds_at(layer)[0] == ALWAYS


class StepPlan:
    """Who may exit in one forward pass, who did, and with what logits."""

    def __init__(
        self,
        row_ends: Sequence[int],
        last_positions: Sequence[int],
        rules: ExitRules,
        candidates: Sequence[Candidate] = (),
        known_depth: Tensor | None = None,
    ) -> None:
        """Plans a pass.

        Args:
            row_ends: [B] index after each row's last token.
            last_positions: [B] position of that token in its sequence.
            rules: the model's exit layers.
            candidates: rows that may exit.
            known_depth: [T] depths of recomputed tokens, full depth for all others; None where
                nothing is recomputed.
        """
        self.row_ends = row_ends
        self.lengths = [end - start for start, end in pairwise([0, *row_ends])]
        """[B] tokens of each row."""
        self.last_positions = last_positions
        self.known_depth = known_depth
        self.depth: dict[int, int] = {}
        """Exit layers of the rows that exited."""
        self.logits: list[tuple[list[int], Tensor]] = []
        """Logits of successful checks: rows [N], logits [N, V]."""
        self._exit_layers = rules.exit_layers
        self._candidates = list(candidates)

    def is_plain(self) -> bool:
        """Whether the pass runs its own tokens through all layers, unchecked; ask once, first."""
        if self.known_depth is not None or any(one.pending for one in self._candidates):
            return False
        checks = [
            (one.schedule, layer)
            for one in self._candidates
            for layer in self._exit_layers
            if one.policy.thresholds_at(layer)[0] < math.inf
        ]
        if any(not schedule.waits(layer) for schedule, layer in checks):
            return False
        for schedule, layer in checks:
            schedule.wants(layer)  # the token passes by without a check
        return True

    def due(self, layer: int) -> list[Candidate]:
        """The rows to check after `layer` layers; to be asked once a layer, in order."""
        if layer not in self._exit_layers:
            return []
        return [
            one
            for one in self._candidates
            if one.row not in self.depth
            and one.policy.thresholds_at(layer)[0] < math.inf
            and one.schedule.wants(layer)
        ]

    def take_pending(self, layer: int, rows: Collection[int]) -> dict[int, Tokens]:
        """Tokens that wait at `layer` and go on with their `rows`."""
        found = {
            one.row: one.pending.take(layer)
            for one in self._candidates
            if one.pending is not None and one.row in rows
        }
        return {row: tokens for row, tokens in found.items() if tokens is not None}

    def decide(
        self, checked: Sequence[Candidate], layer: int, confidence: Tensor, ends: Tensor
    ) -> list[bool]:
        """Who exits after a check, and a note of it in each request's past.

        Args:
            checked: [N] what `due` returned.
            layer: the exit layer.
            confidence: [N].
            ends: [N] bool, whether the check's greedy token ends the sequence.
        """
        pairs = torch.tensor([one.policy.thresholds_at(layer) for one in checked])
        mask = exit_mask(confidence, ends, pairs[:, 0], pairs[:, 1])
        exits: list[bool] = mask.tolist()
        for one, passed in zip(checked, exits, strict=True):
            one.schedule.saw(layer, passed)
        return exits

    def keep_logits(self, rows: Sequence[int], logits: Tensor) -> None:
        """Keeps the logits [N, V] of a check that `rows` [N] passed, for the sampler."""
        self.logits.append((list(rows), logits))

    def without_logits(self, num_rows: int) -> list[int]:
        """The rows of all `num_rows` that have no logits yet, ascending."""
        kept = {row for rows, _ in self.logits for row in rows}
        return [row for row in range(num_rows) if row not in kept]


def merge_logits(plan: StepPlan, fresh: Tensor | None, num_rows: int) -> Tensor | None:
    """Logits of all rows [B, V], in row order.

    Args:
        plan: holds those of the rows that exited.
        fresh: the others', in row order; None on ranks that get no logits.
        num_rows: B.
    """
    order = [row for rows, _ in plan.logits for row in rows]
    parts = [logits for _, logits in plan.logits]
    if len(order) < num_rows:
        if fresh is None:
            return None
        order += plan.without_logits(num_rows)
        parts.append(fresh)
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    if order == list(range(num_rows)):
        return joined
    return joined[torch.tensor(order).argsort()]
