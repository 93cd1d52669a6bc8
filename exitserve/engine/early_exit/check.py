"""Exit checks of rows whose exits the host decides, and what becomes of their outcome.

Shapes: N rows to check, B rows, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exitserve.engine.early_exit.batch import Candidate, Step
from exitserve.engine.layers.exit_head import ExitHead
from exitserve.engine.recorder import Recorder


class Checks:
    """Makes the exit checks of one model."""

    def __init__(self, head: ExitHead, recorder: Recorder) -> None:
        self.head, self._recorder = head, recorder

    def check(self, normed: Tensor, due: list[Candidate], layer: int, step: Step) -> list[int]:
        """Checks rows after `layer` layers.

        Args:
            normed: [N, D] normed states of their tokens.
            due: [N] the rows.
            layer: the exit layer.
            step: takes the outcome.

        Returns:
            Indices within `due` of those that exit.
        """
        limits = [one.request.policy.thresholds_at(layer) for one in due]
        exits, logits = self.head.decide(normed, limits)
        return self.settle(step, layer, due, exits, logits, range(len(due)))

    def settle(
        self,
        step: Step,
        layer: int,
        due: Sequence[Candidate],
        exits: Sequence[bool],
        logits: Tensor,
        places: Sequence[int],
    ) -> list[int]:
        """Notes the outcome of a check.

        Args:
            step: takes depths and logits.
            layer: the exit layer.
            due: [N] the rows.
            exits: [N] which of them exit.
            logits: as `ExitHead.check` gives them.
            places: [N] where the rows are in these.

        Returns:
            Indices within `due` of those that exit.
        """
        passed = [index for index, leaves in enumerate(exits) if leaves]
        if passed:
            step.depth |= dict.fromkeys((due[index].row for index in passed), layer)
            # The others get the whole head's logits, once the pass is through.
            kept = [index for index in passed if not due[index].request.needs_whole_head]
            if kept:
                own = self.head.logits_of(logits, [places[index] for index in kept])
                step.keep_logits([due[index].row for index in kept], own)
        self._recorder.count_checks(layer, len(due), len(passed))
        self._recorder.frozen_tokens += len(passed)
        return passed


class HostMaskedRows:
    """See `exitserve.engine.early_exit.masked_loop.MaskedRows`; the host decides."""

    padding: Tensor | None = None
    known_depth: Tensor | None

    def __init__(self, checks: Checks, step: Step, recorder: Recorder, like: Tensor) -> None:
        self._checks, self._step, self._recorder = checks, step, recorder
        self._due: list[Candidate] = []
        self.places = torch.tensor(step.row_ends, device=like.device) - 1
        known = step.known_depth
        self.known_depth = None if known is None else known.to(like.device)

    def due(self, layer: int, running: Tensor) -> Tensor:
        """The rows that may exit there."""
        self._due = self._step.due(layer)
        return self._mask([one.row for one in self._due])

    def thresholds(self, layer: int) -> tuple[Tensor, Tensor]:
        """Those of the rows that are due; 0 for all others."""
        found = torch.zeros(len(self.places), 2)
        for one in self._due:
            found[one.row] = torch.tensor(one.request.policy.thresholds_at(layer))
        return found[:, 0], found[:, 1]

    def settle(self, layer: int, due: Tensor, passed: Tensor, logits: Tensor) -> Tensor:
        """Notes the outcome."""
        outcome, places = passed.tolist(), [one.row for one in self._due]
        exits = [outcome[row] for row in places]
        found = self._checks.settle(self._step, layer, self._due, exits, logits, places)
        return self._mask([places[index] for index in found])

    def count_layers(self, layers: int) -> None:
        """Counts them."""
        self._recorder.layer_reads += layers

    def _mask(self, rows: Sequence[int]) -> Tensor:
        mask = torch.zeros(len(self.places), dtype=torch.bool)
        mask[list(rows)] = True
        return mask.to(self.places.device)
