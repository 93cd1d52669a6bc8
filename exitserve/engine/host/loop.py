"""The loop on the host: run a segment, check, freeze, propagate, go on or stop.

A decoder of L layers with exit layers e1 < e2 < ... runs as segments (0, e1], (e1, e2], ... After
each exit layer the rows that may exit are checked. Those that pass fill the key-value cache of
all layers above from their frozen state and leave the batch; the next segment runs the rows that
are left, and when none is left the pass ends (`exitserve.engine.host.rearranged`). In mode "defer"
a row that leaves fills nothing: its token waits at the exit layer until the next one of its request
goes on, which takes it along.

On servers that draft, tokens that pass their check after a pass are followed by their guess at the
next, again and again (`exitserve.engine.host.drafts`), and wait, each where it stopped, for the
next pass. In mode "verify" that judges the guesses. In other modes they are the tokens; in mode
"confidence" only the last one waits, since those that exited are frozen.

Passes whose rows cannot be rearranged run masked instead, every row in its place
(`exitserve.engine.layers.masked_loop`): those that recompute a preempted request, whose frozen
tokens lie in the midst of a chunk, and all of them with `exit_path: masked`, the yardstick of
tests.

Shapes: T tokens, A active tokens, B rows, N rows to check, S samples, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context

from exitserve.engine.compat.context import (
    batch_shape,
    cache_slots,
    can_rearrange,
)
from exitserve.engine.host.active_tokens import ActiveTokens
from exitserve.engine.host.checks import Checks, HostMaskedRows
from exitserve.engine.host.drafts import Drafting
from exitserve.engine.host.rearranged import Rearranged
from exitserve.engine.host.requests import HostRequests
from exitserve.engine.host.step import Draft, Step, merge_logits
from exitserve.engine.layers.exit_head import ExitHead
from exitserve.engine.layers.masked_loop import MaskedLoop, MaskedSegment
from exitserve.engine.layers.propagation import Propagation
from exitserve.engine.layers.segments import Segment, Stream
from exitserve.engine.state import EngineState

FEW = 64
"""Rows with which checks and propagation are compiled, at most."""


class HostLoop:
    """The forward passes of one model."""

    def __init__(
        self,
        state: EngineState,
        model: Any,
        segments: Sequence[Segment],
        head: ExitHead,
        propagation: Propagation,
        *,
        masked: bool,
    ) -> None:
        """Takes a model's parts.

        Args:
            state: the engine's.
            model: a `MultiExitMixin`.
            segments: its layers, from exit to exit; none for a model without exits.
            head: its exit checks.
            propagation: of its keys and values.
            masked: whether all passes with exits run masked.
        """
        self.requests = HostRequests(state)
        self._rules, self._recorder = state.rules, state.recorder
        self._model, self._segments = model, segments
        self._propagation, self._masked = propagation, masked
        self.checks = self.make_checks(head)
        self._rearranged = Rearranged(self.requests, self.checks, propagation)
        self._drafting = Drafting(self.requests, model, segments, self._rearranged, self.checks)
        self._step: Step | None = None
        self._context: ForwardContext | None = None
        """Of the last pass, for drafts."""
        self._like: Tensor | None = None
        """[0, V] as the head's logits are; None on ranks that get none."""

    def make_checks(self, head: ExitHead) -> Checks:
        """What checks rows; benchmarks of random weights override it."""
        return Checks(head, self._recorder)

    def run(
        self, positions: Tensor, embed: Callable[[], Tensor], plain: Callable[[], Tensor]
    ) -> Tensor:
        """Runs a pass; returns normed states [T, D].

        Args:
            positions: [T].
            embed: gives the first layer's input [T, D].
            plain: vLLM's own pass.
        """
        shape = batch_shape()
        if shape is None:  # profiling, before there is a cache
            self._step = None
            if self._segments:
                self._warm_up(positions, embed())
            return self._run_plain(plain)
        self._context = get_forward_context() if self._rules.num_drafts else None
        self.requests.start_pass()
        decoding = self.requests.decoding(shape, positions)
        if decoding and not any(one.may_exit for one in decoding):
            self._step = None  # a pass that none leaves needs no step: it is vLLM's own
            self.requests.count_plain(len(decoding))
            return self._run_plain(plain)
        if decoding:
            step = self.requests.decoding_step(decoding, positions)
        else:
            step = self.requests.next_step(shape, positions)
        self._step = step
        if step.is_plain:
            # Where no row may exit, the pass is vLLM's own, bit for bit.
            normed = self._run_plain(plain)
        elif (
            step.known_depth is not None or self._masked or not can_rearrange(get_forward_context())
        ):
            hidden = embed()
            self._catch_up(hidden, step)
            normed = self._run_masked(positions, hidden, step)
        else:
            normed = self._run_rearranged(positions, embed(), step)
        self.requests.record(step)
        return normed

    def _run_plain(self, plain: Callable[[], Tensor]) -> Tensor:
        normed = plain()
        self._recorder.count_layers(self._rules.num_layers)
        return normed

    def _run_masked(self, positions: Tensor, hidden: Tensor, step: Step) -> Tensor:
        """All rows through all layers, frozen ones with their state restored after each."""
        segments = [MaskedSegment(one.end, one.masked) for one in self._segments]
        self._propagation.load(hidden)
        loop = MaskedLoop(segments, self.checks.head, self._propagation)
        rows = HostMaskedRows(self.checks, step, self._recorder, hidden)
        return loop.run(positions, hidden, rows)

    def _run_rearranged(self, positions: Tensor, hidden: Tensor, step: Step) -> Tensor:
        """Segment by segment, with the rows that still run."""
        active = ActiveTokens(
            step.lengths, positions.tolist(), (hidden, None), cache_slots(), positions
        )
        left = torch.zeros_like(hidden)
        self._rearranged.run(active, step, self._segments, left=left)
        return active.hand_over(left) if active.rows else left

    def _warm_up(self, positions: Tensor, hidden: Tensor) -> None:
        """Compiles the segments, the exit check and what propagation computes.

        Passes count their mixture-of-experts layers in the forward context, so this has its own.
        """
        with override_forward_context(replace(get_forward_context())):
            normed = hidden
            stream: Stream = (hidden, None)
            for segment in self._segments:
                self._rearranged.is_pair = stream[1] is not None
                normed, _, *stream = segment(positions, *stream)
            self.checks.head.warm_up(normed[:FEW])
            self._propagation.warm_up(normed[:FEW])

    def _catch_up(self, hidden: Tensor, step: Step) -> None:
        """Runs all pending tokens by themselves, before a pass that cannot take them along."""
        step.restart_waiting()
        if not step.has_more(()):
            return
        nothing = [list[int]() for _ in cache_slots()]
        active = ActiveTokens([0] * len(step.lengths), [], (hidden[:0], None), nothing)
        self._rearranged.run(active, step.only_pending(), self._segments)

    def draft(self, rows: Sequence[Draft]) -> None:
        """Drafts after a pass; see `exitserve.engine.host.drafts`."""
        assert self._context is not None, "a pass was before this"
        if self._masked or not can_rearrange(self._context):
            return
        with override_forward_context(self._context):
            self._drafting.run(rows)

    def logits(self, normed: Tensor, compute: Callable[[Tensor], Tensor | None]) -> Tensor | None:
        """Logits to sample from: a successful check's own, else the head's.

        Args:
            normed: [S, D].
            compute: the model's own head, of normed states.

        Returns:
            [S, V]; of each row's last sample alone [B, V], where exits decided all drafts
            (`exitserve.engine.compat.runner.accept_decided`).
        """
        step, self._step = self._step, None  # prompt logprobs call again, for other states
        return self._logits(step, normed, compute)

    def _logits(
        self, step: Step | None, normed: Tensor, compute: Callable[[Tensor], Tensor | None]
    ) -> Tensor | None:
        """See `logits`."""
        fresh = self._counted(compute)
        if step is None or not step.found or normed.shape[0] != step.num_samples:
            return self.sampled(step, fresh(normed))
        last = self.requests.samples_last(step)
        wanted = step.last_samples() if last else step.every_sample()
        rest = step.without_logits(wanted)
        if rest and len(step.depth) == len(step.row_ends):
            # All rows left early, some unconditionally: this is the head of their exit.
            self._recorder.head_passes += 1
            self._recorder.final_heads -= 1
        if len(rest) == step.num_samples:
            return self.sampled(step, fresh(normed))
        some = fresh(normed[rest]) if rest else None
        merged = merge_logits(step, wanted, some, self._like)
        return merged if last else self.sampled(step, merged)

    def _counted(
        self, compute: Callable[[Tensor], Tensor | None]
    ) -> Callable[[Tensor], Tensor | None]:
        """`compute`, with its pass through the head counted."""

        def count(normed: Tensor) -> Tensor | None:
            self._recorder.final_heads += 1
            found = compute(normed)
            self._like = None if found is None else found[:0]
            return found

        return count

    def sampled(self, step: Step | None, logits: Tensor | None) -> Tensor | None:
        """The logits [S, V] that are sampled from; benchmarks of random weights override this."""
        return logits
