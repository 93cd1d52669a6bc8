"""The passes of a model on the host: run a segment, check, freeze, propagate, go on or stop.

A decoder of L layers with exit layers e1 < e2 < ... runs as segments (0, e1], (e1, e2], ... After
each exit layer the rows that may exit are checked. Those that pass fill the key-value cache of
all layers above from their frozen state and leave the batch; the next segment runs the rows that
are left, and when none is left the pass ends.

Passes whose rows cannot leave run masked instead, every row in its place
(`exitserve.engine.early_exit.masked_loop`): those that recompute a preempted request, whose frozen
tokens lie in the midst of a chunk, and those of an attention backend that we cannot narrow.

Shapes: T tokens, A tokens that run, B rows, S samples, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, override_forward_context

from exitserve.engine.compat.context import batch_shape, can_narrow, narrow
from exitserve.engine.early_exit.active_rows import ActiveRows
from exitserve.engine.early_exit.batch import HostRequests, Step
from exitserve.engine.early_exit.check import Checks, HostMaskedRows
from exitserve.engine.early_exit.masked_loop import MaskedLoop, MaskedSegment
from exitserve.engine.layers.exit_head import ExitHead
from exitserve.engine.layers.propagation import Propagation
from exitserve.engine.layers.segments import Segment, Stream, total_of
from exitserve.engine.state import EngineState

FEW = 64
"""Rows with which checks and propagation are compiled, at most."""


class HostLoop:
    """The forward passes of one model."""

    def __init__(
        self,
        state: EngineState,
        segments: Sequence[Segment],
        head: ExitHead,
        propagation: Propagation,
    ) -> None:
        """Takes the engine's state and a model's parts; without exits it has no segments."""
        self._requests = HostRequests(state)
        self._rules, self._recorder = state.rules, state.recorder
        self._segments, self._propagation = segments, propagation
        self._checks = Checks(head, self._recorder)
        self._step: Step | None = None

    def run(
        self, positions: Tensor, embed: Callable[[], Tensor], plain: Callable[[], Tensor]
    ) -> Tensor:
        """Runs a pass; returns normed states [T, D].

        Args:
            positions: [T].
            embed: gives the first layer's input [T, D].
            plain: vLLM's own pass.
        """
        self._step, shape = None, batch_shape()
        if shape is None:  # profiling, before there is a cache
            if self._segments:
                self._warm_up(positions, embed())
            return self._run_plain(plain)
        step = self._step = self._requests.next_step(shape, positions)
        if step.is_plain:
            # Where no row may exit, the pass is vLLM's own, bit for bit.
            normed = self._run_plain(plain)
        elif step.known_depth is not None or not can_narrow(get_forward_context()):
            normed = self._run_masked(positions, embed(), step)
        else:
            normed = self._run_active(positions, embed(), step)
        self._requests.record(step)
        return normed

    def _run_plain(self, plain: Callable[[], Tensor]) -> Tensor:
        self._recorder.layer_reads += self._rules.num_layers
        return plain()

    def _run_masked(self, positions: Tensor, hidden: Tensor, step: Step) -> Tensor:
        """All rows through all layers, frozen ones with their state restored after each."""
        segments = [MaskedSegment(one.end, one.masked) for one in self._segments]
        self._propagation.load(hidden)
        loop = MaskedLoop(segments, self._checks.head, self._propagation)
        rows = HostMaskedRows(self._checks, step, self._recorder, hidden)
        return loop.run(positions, hidden, rows)

    def _run_active(self, positions: Tensor, hidden: Tensor, step: Step) -> Tensor:
        """Segment by segment, with the rows that still run."""
        active, states = ActiveRows(step.lengths, positions, hidden), torch.empty_like(hidden)
        base = get_forward_context()
        with override_forward_context(replace(base)):
            for segment in self._segments:
                active.run(segment)
                self._recorder.layer_reads += segment.size
                gone = self._check(active, segment.end, step, states)
                if len(gone) == len(active.rows):
                    return states
                if gone:
                    active.leave(gone)
                    narrow(base, active.rows, active.lengths, active.tokens)
        return states.index_copy_(0, active.tokens, active.normed)

    def _check(self, active: ActiveRows, layer: int, step: Step, states: Tensor) -> set[int]:
        """Checks rows that have run `layer` layers, and propagates the keys and values of those
        that exit, which it returns; `states` [T, D] takes their normed states."""
        due = step.due(layer)
        if not due:
            return set()
        places = active.last_tokens([one.row for one in due])
        normed = active.normed if len(places) == len(active.tokens) else active.normed[places]
        passed = self._checks.check(normed, due, layer, step)
        if passed:
            left = torch.tensor([places[index] for index in passed])
            states[active.tokens[left]] = normed[passed]
            total = total_of(active.stream)
            self._propagation.fill(total[left], active.positions[left], layer, left)
        return {due[index].row for index in passed}

    def _warm_up(self, positions: Tensor, hidden: Tensor) -> None:
        """Compiles the segments, the exit check and what propagation computes.

        Passes count their mixture-of-experts layers in the forward context, so this has its own.
        """
        with override_forward_context(replace(get_forward_context())):
            normed = hidden
            stream: Stream = (hidden, None)
            for segment in self._segments:
                normed, *stream = segment(positions, *stream)
            self._checks.head.warm_up(normed[:FEW])
            self._propagation.warm_up(normed[:FEW])

    def logits(self, normed: Tensor, compute: Callable[[Tensor], Tensor | None]) -> Tensor | None:
        """Logits [S, V] to sample from: a successful check's own, else the head's.

        Args:
            normed: [S, D].
            compute: the model's own head, of normed states.
        """
        step, self._step = self._step, None  # prompt logprobs call again, for other states
        if step is None or not step.depth or len(normed) != len(step.row_ends):
            self._recorder.final_heads += 1
            return compute(normed)
        rest = step.rows_without_logits
        self._recorder.final_heads += bool(rest)
        return step.with_logits(compute(normed[rest]) if rest else None)
