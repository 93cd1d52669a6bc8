"""Several tokens a step on a CPU: a token that is decided is followed by the next one at once.

After a pass, rows run their last token to its first exit that passes, or through all layers, again
and again: what that says of the next token is what another pass would say. So each such *turn* is a
pass without vLLM's own work of a step. Tokens that exit wait for one that goes on, or for a pass
that cannot do without them; none runs twice. (In mode "confidence" they freeze.)

In mode "verify" turns stop at the last exit: who passes none waits for the next pass, which judges
the drafts.

Shapes: N rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from exitserve.engine.compat.context import slots_ahead
from exitserve.engine.compat.sampling import Sampled
from exitserve.engine.host.active_tokens import ActiveTokens
from exitserve.engine.host.checks import Checks
from exitserve.engine.host.rearranged import Rearranged
from exitserve.engine.host.requests import HostRequests
from exitserve.engine.host.step import Draft, Step, draft_step
from exitserve.engine.layers.segments import Segment

Slots = Mapping[tuple[int, int], Sequence[int]]
"""By row and position, where keys and values go in each of the cache groups."""


class Drafting:
    """Drafts with one model's own layers."""

    def __init__(
        self,
        requests: HostRequests,
        model: Any,
        segments: Sequence[Segment],
        rearranged: Rearranged,
        checks: Checks,
    ) -> None:
        """Takes a model's parts."""
        self._requests, self._model, self._checks = requests, model, checks
        self._segments, self._rearranged = segments, rearranged

    def run(self, rows: Sequence[Draft]) -> None:
        """Drafts the next tokens of rows, as far as they are decided.

        Args:
            rows: those that may draft, after a pass and in its context; each takes what it found.
        """
        every, through = rows, all(one.stands for one in rows)
        starts = {one.row: one.position for one in rows}
        slots = slots_ahead(starts, max(one.most for one in rows))
        while rows:
            rows = self._turn(rows, self._segments if through else self._segments[:-1], slots)
        self._rearranged.fill_frozen(every)

    def _turn(
        self, rows: Sequence[Draft], segments: Sequence[Segment], slots: Slots
    ) -> list[Draft]:
        """Runs the last token of each row as far as it gets.

        Args:
            rows: those that draft.
            segments: the layers that they may run.
            slots: of their tokens.

        Returns:
            The rows that go on.
        """
        step = draft_step(rows, self._requests.rules)
        active = self._active(rows, step, slots)
        self._rearranged.run(active, step, segments)
        finished = active.rows
        if finished and active.num_layers == self._requests.rules.num_layers:
            self._checks.at_full_depth(active.last_normed(), finished, step)
        elif finished:
            self._rearranged.wait(active, step)
            finished = []
        sampled = self._sample(rows, step) if step.logits else {}
        return [one for one in rows if self._goes_on(one, step, finished, sampled.get(one.row))]

    def _active(self, rows: Sequence[Draft], step: Step, slots: Slots) -> ActiveTokens:
        """The last tokens of rows, which have not run."""
        positions = [one.position for one in rows]
        tokens, at = torch.tensor([[one.token for one in rows], positions])
        hidden = self._model.embed(tokens, at, None)
        own = zip(*(slots[one.row, one.position] for one in rows), strict=True)
        return ActiveTokens(step.lengths, positions, (hidden, None), list(own), at)

    def _sample(self, rows: Sequence[Draft], step: Step) -> dict[int, Sampled]:
        """Samples the next tokens of the rows whose logits a turn kept; returns them by row."""
        by_row = {one.row: one for one in rows}
        ahead = {row: by_row[row].found for kept, _ in step.logits for row in kept}
        wanted = [row for row in ahead if by_row[row].candidate.request.wants_logprobs]
        logits = torch.cat([some for _, some in step.logits])
        found = zip(ahead, self._requests.sampler.sample(logits, ahead, wanted), strict=True)
        return dict(found)

    def _goes_on(
        self, one: Draft, step: Step, finished: Sequence[int], sampled: Sampled | None
    ) -> bool:
        """Tells a row what follows its last token; returns whether it drafts on.

        Args:
            one: the row.
            step: of the turn.
            finished: the rows that ran all layers.
            sampled: its next token, if that took vLLM's sampler.
        """
        if one.row not in step.guesses:
            return False
        request, last = one.candidate.request, one.position
        token = step.guesses[one.row] if sampled is None else sampled.token
        goes_on = one.take(token, step.depth[one.row], sampled)
        if one.row in finished:
            assert request.pending is not None
            request.pending.finish(last, len(request.decided), self._requests.pass_number)
        return goes_on
