"""Segment by segment, with the rows that still run.

After each segment the rows that are due are checked. Those that pass leave: they fill the keys and
values of all layers above from their frozen state, or wait at the exit (modes "defer" and
"verify"). The next segment runs the rows that are left, with the tokens that waited for them.

Tokens that freeze while drafted fill nothing at once: their keys and values are wanted when the
next one goes beyond their exit, and then those of several are one product.

Shapes: T tokens, A active tokens, B rows, N rows to check, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, override_forward_context

from exitserve.engine.compat.context import PassContexts
from exitserve.engine.host.active_tokens import ActiveTokens, taken
from exitserve.engine.host.checks import Checks
from exitserve.engine.host.requests import HostRequests
from exitserve.engine.host.step import Candidate, Draft, Step
from exitserve.engine.layers.propagation import Propagation
from exitserve.engine.layers.segments import Segment
from exitserve.engine.pending_tokens import Tokens, joined


class Rearranged:
    """Runs segments of passes whose rows leave one by one."""

    def __init__(self, requests: HostRequests, checks: Checks, propagation: Propagation) -> None:
        """Takes a model's parts."""
        self._requests, self._checks, self._propagation = requests, checks, propagation
        self._rules, self._recorder = requests.rules, requests.recorder
        self.is_pair = False
        """Whether layers carry the stream as a pair."""
        self._contexts: PassContexts | None = None

    def run(
        self,
        active: ActiveTokens,
        step: Step,
        segments: Sequence[Segment],
        *,
        left: Tensor | None = None,
    ) -> None:
        """Runs segments, each followed by its exit check.

        Args:
            active: the tokens that run; afterwards those that ran all of `segments`, or where the
                pass stopped.
            step: takes the outcome of the checks.
            segments: the first of them, or all.
            left: [T, D], takes the normed states of rows that leave, if somebody wants them.
        """
        contexts, gone = self._contexts_of_pass(), set[int]()
        waiting = None if step.is_draft else step.waiting_counts()
        if waiting:
            active.put_off(waiting, step.num_decided())
        if waiting or step.is_draft:
            _arrange(contexts, active)
        else:
            contexts.restart()
        with override_forward_context(contexts.arranged):
            for segment in segments:
                leaving = self._run_segment(segment, active, step, left)
                gone |= leaving
                if len(active.rows) == len(leaving) and not step.has_more(gone):
                    active.change(leaving, {})
                    break
                self._fill(contexts, segment.end, step.take_frozen(segment.end, gone))
                taken = step.take_pending(segment.end, gone)
                if leaving or taken:
                    active.change(leaving, taken)
                    _arrange(contexts, active)

    def fill_frozen(self, rows: Sequence[Draft]) -> None:
        """Propagates keys and values of all tokens that froze while rows drafted."""
        contexts, pending = (
            self._contexts_of_pass(),
            [one.candidate.request.pending for one in rows],
        )
        for layer in self._rules.exit_layers:
            found = [one.take_frozen(layer) for one in pending if one is not None]
            self._fill(contexts, layer, [tokens for tokens in found if tokens is not None])

    def wait(self, active: ActiveTokens, step: Step) -> None:
        """Leaves the active tokens where they are."""
        total, number = active.total(), self._requests.pass_number
        for row in active.rows:
            step.pending[row].wait(active.num_layers, active.tokens_of(row, total), number)

    def _contexts_of_pass(self) -> PassContexts:
        """For the current context, which is that of a pass; the same one for all of its drafts."""
        base = get_forward_context()
        if self._contexts is None or self._contexts.base is not base:
            self._contexts = PassContexts(base)
        return self._contexts

    def _fill(self, contexts: PassContexts, layer: int, parts: Sequence[Tokens]) -> None:
        """Propagates keys and values of tokens that froze at `layer`, all at once."""
        if parts:
            tokens = joined(parts)
            with override_forward_context(contexts.with_slots(tokens.slots)):
                self._propagation.fill(tokens.state, torch.tensor(tokens.positions), layer)

    def _run_segment(
        self, segment: Segment, active: ActiveTokens, step: Step, left: Tensor | None
    ) -> set[int]:
        """Runs and checks the active tokens; returns the rows that leave."""
        if not active.rows:  # all wait further up
            hidden, _ = active.stream
            active.stream = hidden, hidden if self.is_pair else None
            return set()
        active.run(segment)
        self._recorder.count_layers(segment.size)
        if not step.is_judged:
            self._recorder.count_deferred_layers(active.num_pending * segment.size)
        return self._check_exits(active, segment.end, step, left)

    def _check_exits(
        self, active: ActiveTokens, layer: int, step: Step, left: Tensor | None
    ) -> set[int]:
        """Checks at an exit layer, and propagates or defers the keys and values of rows that pass.

        Args:
            active: the tokens that run.
            layer: how many layers they have run.
            step: takes the outcome.
            left: see `run`.

        Returns:
            The rows that leave.
        """
        due = step.due(layer)
        if not due:
            return set()
        if active.scores is not None:
            scores = active.scores.tolist()
            own = [scores[place] for place in active.last_tokens([one.row for one in due])]
            opened = self._checks.opened(own, due, layer)
            if not opened:
                return set()
            due = [due[index] for index in opened]
        places = active.last_tokens([one.row for one in due])
        normed = taken(active.normed, places)
        passed = self._checks.check(normed, due, layer, step)
        if not passed:
            return set()
        if left is not None:
            left[[active.tokens[places[index]] for index in passed]] = normed[passed]
        total, frozen, gone = active.total(), list[int](), set[int]()
        for index in passed:
            one = due[index]
            if one.request.freezes and not step.is_draft:
                frozen.append(index)
            elif not self._keep(one, active.tokens_of(one.row, total), layer, step):
                continue
            gone.add(one.row)
        if frozen:
            self._recorder.count_frozen(len(frozen))
            some = torch.tensor([places[index] for index in frozen])
            self._propagation.fill(total[some], active.positions[some], layer, some)
        return gone

    def _keep(self, one: Candidate, tokens: Tokens, layer: int, step: Step) -> bool:
        """Leaves a row's tokens at the exit that the last one passed, unless they must run on."""
        pending, number = one.request.pending, self._requests.pass_number
        assert pending is not None
        if one.request.freezes:
            # Its keys and values are wanted only when a token goes on, with those of others.
            pending.freeze(layer, tokens, number)
            self._recorder.count_frozen(1)
            return True
        if not step.is_draft:
            if pending.must_run(tokens.positions[-1], len(tokens)):
                self._recorder.count_flush(self._rules.num_layers - layer, len(pending))
                return False
            self._recorder.count_deferred(1)
        pending.wait(layer, tokens, number)
        return True


def _arrange(contexts: PassContexts, active: ActiveTokens) -> None:
    """Lets attention see the tokens that run."""
    if active.rows:
        contexts.arrange(active.rows, active.lengths, active.ends(), active.slots)
