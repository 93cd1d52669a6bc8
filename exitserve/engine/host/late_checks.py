"""Where leaving does not pay: rows run all layers, and are checked behind the last.

Rows that leave save what their layers would compute. But weights are read as long as one row needs
them, each check reads the head, and a batch is rearranged at every exit; with several rows that
may cost more than it saves (`exitserve.engine.host.timing` finds out). Then no row leaves: the
normed states at the exits are kept, and one read of the head behind the last layer checks all of
them and gives the last layer's logits as well.

A token is the same either way: a screen or check sees nothing but the state at its exit, and that
is the same, since a row's later layers change nothing below them. In mode "defer" they leave the
right keys and values too. In mode "confidence" those of the frozen state are written over theirs
before another token reads them (`exitserve.engine.host.loop`).

Shapes: C rows that may exit, E exits, M states whose logits are read, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exitserve.engine.host.checks import Checks
from exitserve.engine.host.step import Candidate, Step
from exitserve.engine.layers.exit_head import HostDecision, Limits
from exitserve.engine.recorder import Recorder


@dataclass(frozen=True)
class _Wanted:
    """What the policies of some rows say of all exits; it outlasts many passes."""

    names: list[str]
    """[C] the requests."""
    least_scores: list[list[float]]
    """[E][C] scores above which a screen lets rows through to a check."""
    limits: list[Limits]
    """[E x C]."""
    may_exit: list[list[bool]]
    """[E][C]."""
    are_noted: bool
    """Whether one of the rows' requests asks for a full trace."""


@dataclass(frozen=True)
class _Read:
    """One read of the head: checks, and behind them the last layer's rows."""

    numbers: dict[int, int]
    """By exit and row (as E x C), which of the checks it is."""
    found: HostDecision
    """Of the checks."""
    logits: Tensor
    """[M, ...], as `ExitHead.check` gives them."""


class LateChecks:
    """Checks rows at all exits at once."""

    def __init__(self, checks: Checks, recorder: Recorder) -> None:
        """Takes the model's checks, and what counts."""
        self._checks, self._recorder = checks, recorder
        self._exit_layers = recorder.exit_layers
        self._last: _Wanted | None = None

    def settle(
        self,
        step: Step,
        at_exits: Sequence[Tensor],
        scores: Sequence[Tensor | None],
        normed: Tensor,
    ) -> None:
        """Decides at which exit each row would have left.

        Args:
            step: takes depths and logits.
            at_exits: E times [C, D] normed states of the rows that may exit.
            scores: E times [C] of the exits' screens.
            normed: [C, D] states behind the last layer.
        """
        rows, last = step.candidates, self._recorder.num_layers
        wanted = self._wanted(rows)
        states = torch.cat([*at_exits, normed])
        opened = _opened(wanted, scores)
        asked = [place for place, opens in enumerate(opened) if opens]
        read = self._read(wanted, asked, states) if asked else None
        self._settle(step, wanted, opened, read)
        depths = [step.depth.get(one.row, last) for one in rows]
        self._recorder.count_deferred_layers(sum(last - depth for depth in depths))
        if read is not None:
            self._keep_logits(step, read, depths)

    def _read(self, wanted: _Wanted, asked: Sequence[int], states: Tensor) -> _Read:
        """Reads the head for some of the states [(E + 1) x C, D], and for those behind the last."""
        finals = range(len(states) - len(wanted.names), len(states))
        places = torch.tensor([*asked, *finals])
        limits = [wanted.limits[place] for place in asked]
        found, logits = self._checks.head.decide(states.index_select(0, places), limits)
        # The last layer's logits, which are among these, are needed anyway.
        self._recorder.final_heads += 1
        numbers = {place: number for number, place in enumerate(asked)}
        return _Read(numbers, found, logits)

    def _wanted(self, rows: Sequence[Candidate]) -> _Wanted:
        names = [one.request.name for one in rows]
        if self._last is None or self._last.names != names:
            layers = self._exit_layers
            self._last = _Wanted(
                names,
                [self._checks.least_scores(rows, layer) for layer in layers],
                [one.thresholds_at(layer) for layer in layers for one in rows],
                [[one.may_exit_at(layer) for one in rows] for layer in layers],
                any(one.request.note_keys for one in rows),
            )
        return self._last

    def _settle(
        self, step: Step, wanted: _Wanted, opened: Sequence[bool], read: _Read | None
    ) -> None:
        """Notes the outcome, exit by exit, for the rows that did not exit before."""
        rows = step.candidates
        for exit_number, layer in enumerate(self._exit_layers):
            first = exit_number * len(rows)
            due = [
                index
                for index, may_exit in enumerate(wanted.may_exit[exit_number])
                if may_exit and rows[index].row not in step.depth
            ]
            made = [index for index in due if opened[first + index]]
            self._recorder.screened[layer] += len(due) - len(made)
            if wanted.are_noted:
                left_out = (rows[index] for index in due if not opened[first + index])
                self._checks.note_screened(left_out, layer, step)
            if read is None or not made:
                continue
            checked = [rows[index] for index in made]
            numbers = [read.numbers[first + index] for index in made]
            if wanted.are_noted:
                tokens = [read.found.tokens[number] for number in numbers]
                confidence = [read.found.confidence[number] for number in numbers]
                self._checks.note_checks(checked, layer, step, tokens, confidence)
            confident = [read.found.exits[number] for number in numbers]
            self._checks.settle(step, layer, checked, confident, head_passes=0)

    def _keep_logits(self, step: Step, read: _Read, depths: Sequence[int]) -> None:
        """Keeps those of each row's depth [C]."""
        exits = {layer: number for number, layer in enumerate(self._exit_layers)}
        kept = []
        for index, depth in enumerate(depths):
            place = exits[depth] * len(depths) + index if depth in exits else None
            kept.append(len(read.numbers) + index if place is None else read.numbers[place])
        # In the rows' order, so that the sampler's logits need no other.
        rows = [one.row for one in step.candidates]
        step.keep_logits(rows, self._checks.head.logits_of(read.logits, kept))


def _opened(wanted: _Wanted, scores: Sequence[Tensor | None]) -> list[bool]:
    """[E x C] which checks are worth making, where a row may exit at all."""
    opened = list[bool]()
    for own, least, may_exit in zip(scores, wanted.least_scores, wanted.may_exit, strict=True):
        if own is None:
            opened += may_exit
            continue
        found = zip(own.tolist(), least, may_exit, strict=True)
        opened += [score > lowest and allowed for score, lowest, allowed in found]
    return opened
