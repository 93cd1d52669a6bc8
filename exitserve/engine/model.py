"""THE loop: run a segment, check, freeze, propagate, go on or stop.

A decoder of L layers with exit layers e1 < e2 < ... runs as segments (0, e1], (e1, e2], ... After
each exit layer the rows that may exit are checked. Those that pass fill the key-value cache of
all layers above from their frozen state and leave the batch; the next segment runs the rows that
are left, and when none is left the pass ends. In mode "defer" a row that leaves fills nothing: its
token waits at the exit layer until the next one of its request goes on, which takes it along.

`draft` is the loop in mode "verify": after a pass, tokens that pass their check are followed by
their guess at the next, again and again. All wait, each where it stopped, for the next pass.

`_run` is that loop. `_run_masked` is the same semantic with every row in its place
(`exitserve.engine.layers.masked_loop`): what a GPU runs, the yardstick that tests compare the
loop with, and the way for the rare passes that recompute a preempted request, whose frozen tokens
lie in the midst of a chunk.

Shapes: T tokens, A active tokens, B rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context

from exitserve.engine.compat.config import refuse_unsupported
from exitserve.engine.compat.context import (
    batch_shape,
    cache_slots,
    can_rearrange,
    rearranged_context,
    slots_at,
)
from exitserve.engine.device.loop import DeviceLoop
from exitserve.engine.device.rows import DeviceRows
from exitserve.engine.hooks.runner_v1 import DeviceRequestsOnV1
from exitserve.engine.host.active_tokens import ActiveTokens
from exitserve.engine.host.masked_rows import HostMaskedRows, settle
from exitserve.engine.host.rows import rows_of
from exitserve.engine.host.step_plan import Candidate, Draft, StepPlan, draft_plan, merge_logits
from exitserve.engine.layers.exit_head import ExitHead
from exitserve.engine.layers.loading import FirstLayers
from exitserve.engine.layers.masked_loop import MaskedLayers, MaskedLoop
from exitserve.engine.layers.propagation import Propagation
from exitserve.engine.layers.segments import Segment, Stream, compiled_segment
from exitserve.engine.options import options_of
from exitserve.gates import load_gates


class MultiExitMixin(FirstLayers):
    """Makes a vLLM decoder stop early; put it, with a `Family`, before the vLLM class."""

    def __init__(self, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        parent: Any = super()  # the vLLM class, to which this is a mixin
        parent.__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
        self._rows = rows_of(vllm_config)
        exit_layers = self._rows.rules.exit_layers
        if exit_layers:
            refuse_unsupported(vllm_config)
        model: Any = self
        rules = self._rows.rules
        gates = {}
        if rules.criterion == "gate":
            gates = load_gates(vllm_config.model_config.model, exit_layers)
        self._head = ExitHead(
            model, parent.compute_logits, self._rows.eos_token_ids, rules.criterion, gates
        )
        layers = model.decoder_layers()
        self._layers: tuple[Any, ...] = tuple(layers)  # a tuple, as in Segment
        self._longest: int = vllm_config.model_config.max_model_len
        self._dtype: torch.dtype = vllm_config.model_config.dtype
        path = options_of(vllm_config).get("exit_path")
        self._masked = path == "masked"
        # Runner V2 captures passes whole, whoever started it.
        is_resident = path == "resident" or vllm_config.use_v2_model_runner
        self._segments: tuple[Segment, ...] = ()
        if exit_layers:
            self._segments = tuple(
                compiled_segment(
                    vllm_config, layers, start, end, model.run_layer, masked=is_resident
                )
                for start, end in pairwise([0, *exit_layers, len(layers)])
            )
        self._resident: DeviceLoop | None = None
        self._on_v1: DeviceRequestsOnV1 | None = None
        if is_resident:
            captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
            parts = (model, self._segments, self._head, self._load_propagation)
            self._resident = DeviceLoop(*parts, captured)
            if not vllm_config.use_v2_model_runner:
                most = vllm_config.scheduler_config.max_num_seqs
                self._on_v1 = DeviceRequestsOnV1(self._rows, model, most)
        self._propagation: Propagation | None = None
        self._pairs = False  # whether layers carry the stream as a pair
        self._plan: StepPlan | None = None
        self._context: ForwardContext | None = None
        """Of the last pass, for drafts."""

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        exits: DeviceRows | None = None,
    ) -> Tensor:
        """Runs each row to its own depth; returns normed states [T, D].

        Args:
            input_ids: [T].
            positions: [T].
            intermediate_tensors: vLLM's, for parts of a model.
            inputs_embeds: [T, D] instead of `input_ids`.
            exits: from runner V2, which leaves all decisions to the device.
        """
        model: Any = self
        own: Any = super().forward  # type: ignore[misc]  # from the vLLM class
        if self._resident is not None:
            if self._on_v1 is not None:
                exits = self._on_v1.begin(batch_shape(), positions)
            normed: Tensor = self._resident.run(
                exits,
                positions,
                lambda: model.embed(input_ids, positions, inputs_embeds),
                lambda: own(input_ids, positions, intermediate_tensors, inputs_embeds),
            )
            if self._on_v1 is not None and exits is not None:
                self._on_v1.ended()
            return normed
        shape = batch_shape()
        plan = self._plan = None if shape is None else self._rows.plan(shape, positions)
        if plan is None and self._segments:
            self._warm_up(model.embed(input_ids, positions, inputs_embeds), positions)
        if plan is None or plan.is_plain():
            # Where nobody may exit, the pass is vLLM's own, bit for bit.
            normed = own(input_ids, positions, intermediate_tensors, inputs_embeds)
            self._rows.recorder.ran(self._rows.rules.num_layers)
        else:
            hidden: Tensor = model.embed(input_ids, positions, inputs_embeds)
            context = get_forward_context()
            if plan.known_depth is not None or self._masked or not can_rearrange(context):
                self._catch_up(positions, hidden, plan)
                normed = self._run_masked(positions, hidden, plan)
            else:
                active = ActiveTokens(plan.lengths, positions, (hidden, None), cache_slots())
                normed = self._run(active, plan, self._segments)
                if active.rows:
                    normed = active.hand_over(model.final_norm(*active.stream), normed)
        if plan is not None:
            self._context = get_forward_context() if self._rows.rules.num_drafts else None
            self._rows.record(plan)
        return normed

    @staticmethod
    def get_model_state_cls() -> Any:
        """Runner V2's door; runner V1 never asks."""
        from exitserve.engine.hooks.model_state import ExitModelState

        return ExitModelState

    def logits_room(self, rows: int, device: torch.device) -> Tensor:
        """Room for the logits [rows, V / R] of a pass whose exits the device decides."""
        return self._head.room(rows, self._dtype, device)

    def _warm_up(self, hidden: Tensor, positions: Tensor) -> None:
        """Loads what propagation needs, and compiles the segments.

        vLLM's own forward pass follows; passes count their mixture-of-experts layers in the
        forward context, so this one has a context of its own.
        """
        self._load_propagation(hidden)
        with override_forward_context(replace(get_forward_context())):
            stream: Stream = (hidden, None)
            for segment in self._segments:
                stream = segment(positions, *stream)
        self._pairs = stream[1] is not None

    def _load_propagation(self, like: Tensor) -> Propagation:
        if self._propagation is None:  # weights are there once the first pass runs
            model: Any = self
            layers = [model.layer_kv(layer) for layer in self._layers]
            exit_layers = self._rows.rules.exit_layers
            self._propagation = Propagation(layers, exit_layers, self._longest, like)
        return self._propagation

    def _run(self, active: ActiveTokens, plan: StepPlan, segments: Sequence[Segment]) -> Tensor:
        """The loop over segments.

        Args:
            active: the tokens that run; afterwards those that ran all of `segments`.
            plan: takes the outcome of the checks.
            segments: the first of them, or all.

        Returns:
            [T, D] normed states of the rows that left.
        """
        base = get_forward_context()
        left = torch.zeros_like(active.total())
        gone = set[int]()
        with ExitStack() as contexts:

            def arrange() -> None:
                if active.rows:
                    context = rearranged_context(base, active)
                    contexts.enter_context(override_forward_context(context))

            if put_off := plan.put_off():
                active.put_off(put_off)
            if put_off or plan.is_draft:
                arrange()
            for segment in segments:
                leaving = self._run_segment(segment, active, plan, left)
                gone |= leaving
                if leaving == set(active.rows) and not plan.has_more(gone):
                    active.change(leaving, {})
                    break
                taken = plan.take_pending(segment.end, gone)
                if leaving or taken:
                    active.change(leaving, taken)
                    arrange()
        return left

    def _run_segment(
        self, segment: Segment, active: ActiveTokens, plan: StepPlan, left: Tensor
    ) -> set[int]:
        """Runs and checks the active tokens; returns the rows that leave."""
        if not active.rows:  # all wait further up
            hidden, _ = active.stream
            active.stream = hidden, hidden if self._pairs else None
            return set()
        active.stream = segment(active.positions, *active.stream)
        self._rows.recorder.ran(segment.size)
        if not plan.is_draft:
            self._rows.recorder.ran_later(active.num_pending * segment.size)
        return self._let_go(active, segment.end, plan, left)

    def _let_go(self, active: ActiveTokens, layer: int, plan: StepPlan, left: Tensor) -> set[int]:
        """Checks at an exit layer, and sees to the keys and values of those that pass.

        Args:
            active: the tokens that run.
            layer: how many layers they have run.
            plan: takes the outcome.
            left: [T, D], takes the normed states of those that pass.

        Returns:
            The rows that leave.
        """
        if not (due := plan.due(layer)):
            return set()
        model: Any = self
        total = active.total()
        places = active.last_tokens([one.row for one in due])
        rows = total if places.shape[0] == total.shape[0] else total[places]
        normed: Tensor = model.final_norm(rows, None)
        if self._head.has_gates:
            opens = self._head.opens(normed, layer, plan.thresholds(due, layer)[0])
            due = [one for one, opened in zip(due, opens.tolist(), strict=True) if opened]
            if not due:
                return set()
            places, normed = places[opens], normed[opens]
        passed = self._check(normed, due, layer, plan)
        left[active.tokens[places[passed]]] = normed[passed]
        frozen, gone = list[int](), set[int]()
        for index in passed:
            row, pending = due[index].row, due[index].pending
            if pending is None:
                frozen.append(index)
            elif pending.must_run(plan.last_positions[row]):
                self._rows.recorder.had_to_run(self._rows.rules.num_layers - layer, len(pending))
                continue
            else:
                if not plan.is_draft:
                    self._rows.recorder.deferred(1)
                pending.wait(layer, active.tokens_of(row, total), self._rows.number)
            gone.add(row)
        if frozen:
            self._rows.recorder.froze(len(frozen))
            some = places[frozen]
            propagation = self._load_propagation(total)
            propagation.fill(total[some], active.positions[some], layer, some)
        return gone

    def _catch_up(self, positions: Tensor, hidden: Tensor, plan: StepPlan) -> None:
        """Runs all pending tokens by themselves, before a pass that cannot take them along."""
        plan.run_anew()
        if not plan.has_more(()):
            return
        none = hidden[:0]
        slots = [group[:0] for group in cache_slots()]
        active = ActiveTokens([0] * len(plan.lengths), positions[:0], (none, None), slots)
        self._run(active, plan.only_pending(), self._segments)

    def draft(self, rows: Sequence[Draft]) -> None:
        """Lets rows say what comes next, as far as they are confident.

        Each token waits for the next pass at the exit layer where it passed, and the one that
        passed nowhere at the last: the next pass computes nothing twice.

        Args:
            rows: those in mode "verify", after a pass; each takes what it found.
        """
        assert self._context is not None, "a pass was before this"
        if self._masked or not can_rearrange(self._context):
            return
        exit_layers = self._rows.rules.exit_layers
        with override_forward_context(self._context):
            while rows := [one for one in rows if one.candidate.is_checked(exit_layers)]:
                rows = self._draft_once(rows)

    def _draft_once(self, rows: Sequence[Draft]) -> list[Draft]:
        """Runs the last token of each row as far as it gets; returns the rows that go on."""
        model: Any = self
        plan = draft_plan(rows, self._rows.rules)
        positions = torch.tensor([one.position for one in rows])
        tokens = torch.tensor([one.token for one in rows])
        slots = slots_at([one.row for one in rows], positions)
        hidden = model.embed(tokens, positions, None)
        active = ActiveTokens(plan.lengths, positions, (hidden, None), slots)
        self._run(active, plan, self._segments[:-1])
        total = active.total()
        for row in active.rows:
            waiting = active.tokens_of(row, total)
            plan.pending[row].wait(self._rows.rules.exit_layers[-1], waiting, self._rows.number)
        guesses = plan.guesses()
        return [one for one in rows if one.row in guesses and one.goes_on(guesses[one.row])]

    def _check(self, normed: Tensor, due: list[Candidate], layer: int, plan: StepPlan) -> list[int]:
        """Exit check after `layer` layers.

        Args:
            normed: [N, D] normed states of the tokens that are checked.
            due: [N] the rows they belong to.
            layer: the exit layer.
            plan: takes the outcome.

        Returns:
            Indices within `due` of those that exit.
        """
        # Who exits unconditionally needs no check, and gets logits with the others at the end.
        asked = [index for index, one in enumerate(due) if not one.is_sure(layer)]
        leaving, logits = list[bool](), normed
        if asked:
            some = normed if len(asked) == len(due) else normed[asked]
            thresholds = plan.thresholds([due[index] for index in asked], layer)
            found, logits = self._head.check(some, layer, *thresholds)
            leaving = found.exits.tolist()
        return settle(
            self._rows, plan, layer, due, leaving, lambda gone: self._head.logits_of(logits, gone)
        )

    def _run_masked(self, positions: Tensor, hidden: Tensor, plan: StepPlan) -> Tensor:
        """All rows through all layers (`exitserve.engine.layers.masked_loop`), as on a GPU."""
        model: Any = self
        bounds = pairwise([0, *self._rows.rules.exit_layers, len(self._layers)])
        segments = [
            MaskedLayers(self._layers[start:end], end, model.run_layer) for start, end in bounds
        ]
        loop = MaskedLoop(segments, model.final_norm, self._head, self._load_propagation(hidden))
        rows = HostMaskedRows(self._rows, plan, self._head, hidden.device)
        return loop.run(positions, hidden, rows)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits of the sampled rows [B, D]: a successful check's own, else the head's."""
        own: Any = super().compute_logits  # type: ignore[misc]  # from the vLLM class
        if self._resident is not None:
            found = self._resident.take_logits(hidden_states.shape[0])
            return own(hidden_states) if found is None else found

        def compute(normed: Tensor) -> Tensor | None:
            self._rows.recorder.final_heads += 1
            return own(normed)  # type: ignore[no-any-return]

        plan, self._plan = self._plan, None  # prompt logprobs call again, for other states
        if plan is None or not plan.depth or hidden_states.shape[0] != plan.num_samples:
            return self._judged(plan, compute(hidden_states))
        rest = plan.without_logits()
        if rest and len(plan.depth) == len(plan.row_ends):
            # All rows left early, some unconditionally: this is the head of their exit.
            self._rows.recorder.head_passes += 1
            self._rows.recorder.final_heads -= 1
        if len(rest) == plan.num_samples:
            return self._judged(plan, compute(hidden_states))
        fresh = compute(hidden_states[rest]) if rest else None
        return self._judged(plan, merge_logits(plan, fresh))

    def _judged(self, plan: StepPlan | None, logits: Tensor | None) -> Tensor | None:
        """The logits [S, V] themselves; in benchmarks, with acceptance of drafts forced."""
        if plan is not None and logits is not None:
            self._rows.force_acceptance(plan, logits)
        return logits
