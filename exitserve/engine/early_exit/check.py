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
        """Takes the model's head, and what counts."""
        self.head, self._recorder = head, recorder

    def opened(self, scores: Sequence[float], due: Sequence[Candidate], layer: int) -> list[int]:
        """Indices of the rows whose check after `layer` layers is worth making.

        Args:
            scores: [N] of the layer's screen.
            due: [N] the rows.
            layer: the exit layer.
        """
        least = self.least_scores(due, layer)
        opened = [index for index in range(len(due)) if scores[index] > least[index]]
        self._recorder.screened[layer] += len(due) - len(opened)
        return opened

    def least_scores(self, due: Sequence[Candidate], layer: int) -> list[float]:
        """[N] scores above which rows are checked."""
        return [self.head.least_score(layer, one.thresholds_at(layer)[0]) for one in due]

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
        # A row that exits unconditionally is not checked: its logits are the final head's.
        asked = [index for index, one in enumerate(due) if not one.exits_unchecked(layer)]
        if not asked:
            return self.settle(step, layer, due, [], head_passes=0)
        some = normed if len(asked) == len(due) else normed[asked]
        rows = [due[index] for index in asked]
        found, logits = self.head.decide(some, [one.thresholds_at(layer) for one in rows])
        passed = self.settle(step, layer, due, found.exits)
        exits = [number for number, index in enumerate(asked) if index in passed]
        if exits:
            gone = [rows[number].row for number in exits]
            step.keep_logits(gone, self.head.logits_of(logits, exits))
        return passed

    def settle(
        self,
        step: Step,
        layer: int,
        due: Sequence[Candidate],
        confident: Sequence[bool],
        *,
        head_passes: int = 1,
    ) -> list[int]:
        """Notes the outcome of a check.

        Args:
            step: takes depths.
            layer: the exit layer.
            due: [N] the rows.
            confident: whether those passed that do not exit unconditionally.
            head_passes: times the LM head was read for it.

        Returns:
            Indices within `due` of those that exit.
        """
        asked = [index for index, one in enumerate(due) if not one.exits_unchecked(layer)]
        stays = {index for index, leaves in zip(asked, confident, strict=True) if not leaves}
        passed = [index for index in range(len(due)) if index not in stays]
        step.depth.update((due[index].row, layer) for index in passed)
        self._recorder.count_checks(layer, len(due), len(passed), head_passes=head_passes)
        self._recorder.count_frozen(len(passed))
        return passed


class HostMaskedRows:
    """See `exitserve.engine.early_exit.masked_loop.MaskedRows`; the host decides."""

    padding: Tensor | None = None
    known_depth: Tensor | None

    def __init__(self, checks: Checks, step: Step, recorder: Recorder, like: Tensor) -> None:
        """Takes the rows of a pass over `like` [T, D]."""
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
            found[one.row] = torch.tensor(one.thresholds_at(layer))
        return found[:, 0], found[:, 1]

    def least_scores(self, layer: int) -> Tensor:
        """Those of the rows that are due; 0 for all others."""
        found = torch.zeros(len(self.places))
        rows = [one.row for one in self._due]
        found[rows] = torch.tensor(self._checks.least_scores(self._due, layer))
        return found

    def count_screened(self, layer: int, rows: Tensor) -> None:
        """Counts them."""
        self._recorder.screened[layer] += int(rows.sum())

    def settle(self, layer: int, due: Tensor, passed: Tensor, logits: Tensor) -> Tensor:
        """Notes the outcome."""
        outcome, checked = passed.tolist(), due.tolist()
        self._due = [one for one in self._due if checked[one.row]]
        asked = [one.row for one in self._due if not one.exits_unchecked(layer)]
        confident = [outcome[row] for row in asked]
        exits = self._checks.settle(
            self._step, layer, self._due, confident, head_passes=bool(asked)
        )
        rows = [self._due[index].row for index in exits]
        gone = [row for row in asked if row in rows]
        if gone:
            self._step.keep_logits(gone, self._checks.head.logits_of(logits, gone))
        return self._mask(rows)

    def count_layers(self, layers: int) -> None:
        """Counts them."""
        self._recorder.count_layers(layers)

    def _mask(self, rows: Sequence[int]) -> Tensor:
        mask = torch.zeros(len(self.places), dtype=torch.bool)
        mask[list(rows)] = True
        return mask.to(self.places.device)
