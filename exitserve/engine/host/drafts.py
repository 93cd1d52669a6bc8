"""Several tokens a step on a CPU: a token that exits is followed by the one its exit decided.

After a pass, rows run their last token as far as its first exit that passes, again and again; each
token waits at its exit for the next pass, which runs nothing twice. (In mode "confidence" tokens
freeze at their exits, and only the last one waits.)

A turn runs layers once for all of its rows, and takes hardly longer for eight than for one. So with
several rows together it has to be shared: drafting stops, and does not go beyond an exit, where
fewer than half of the batch's rows would take part (`--exit-checks all` drafts on). What a token
was not asked there, it is asked in the pass.

Shapes: N rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from exitserve.engine.compat.context import slots_ahead
from exitserve.engine.host.active_tokens import ActiveTokens
from exitserve.engine.host.rearranged import Rearranged
from exitserve.engine.host.requests import HostRequests
from exitserve.engine.host.step import Draft, draft_step
from exitserve.engine.layers.segments import Segment

SHARE = 0.5
"""Of a batch's rows, that a turn needs."""


class Drafting:
    """Drafts with one model's own layers."""

    def __init__(
        self,
        requests: HostRequests,
        model: Any,
        segments: Sequence[Segment],
        rearranged: Rearranged,
    ) -> None:
        """Takes a model's parts."""
        self._requests, self._model = requests, model
        self._segments, self._rearranged = segments[:-1], rearranged
        self._share = 0.0 if requests.rules.always_leaves else SHARE

    def run(self, rows: Sequence[Draft]) -> None:
        """Drafts the next tokens of rows, as far as they are confident.

        Args:
            rows: those that may draft, after a pass and in its context; each takes what it found.
        """
        every, least = rows, self._share * len(self._requests.rows)
        if len(rows) < least:
            return
        places, positions = [one.row for one in rows], [one.position for one in rows]
        ahead = slots_ahead(places, positions, 1 + max(one.most for one in rows))
        for turn in ahead:
            slots = [dict(zip(places, group, strict=True)) for group in turn]
            rows = self._turn(rows, slots, least)
            if not rows or len(rows) < least:
                break
        for one in rows:
            one.stop()
        self._rearranged.fill_frozen(every)

    def _turn(
        self, rows: Sequence[Draft], slots: Sequence[Mapping[int, int]], least: float
    ) -> list[Draft]:
        """Runs the last token of each row as far as it gets.

        Args:
            rows: those that draft.
            slots: for each cache group, by row, where the token's keys and values go.
            least: rows that the layers beyond an exit need.

        Returns:
            The rows that go on.
        """
        step = draft_step(rows, self._requests.rules)
        positions = [one.position for one in rows]
        tokens, at = torch.tensor([[one.token for one in rows], positions])
        hidden = self._model.embed(tokens, at, None)
        own = [[group[one.row] for one in rows] for group in slots]
        active = ActiveTokens(step.lengths, positions, (hidden, None), own, at)
        self._rearranged.run(active, step, self._segments, least=least)
        if active.rows:
            total, number = active.total(), self._requests.pass_number
            for row in active.rows:
                step.pending[row].wait(active.num_layers, active.tokens_of(row, total), number)
        guesses = step.guesses
        self._requests.note_drafting(step, rows)
        return [
            one
            for one in rows
            if one.row in guesses and one.take(guesses[one.row], step.depth[one.row])
        ]
