"""THE loop: run a segment, check, freeze, propagate, go on or stop.

A decoder of L layers with exit layers e1 < e2 < ... runs as segments (0, e1], (e1, e2], ... After
each exit layer the rows that may exit are checked. Those that pass fill the key-value cache of
all layers above from their frozen state and leave the batch; the next segment runs the rows that
are left, and when none is left the pass ends.

`_run` is that loop. `_run_masked` is the same semantic as plainly as it can be said, all rows
through all layers: the yardstick that tests compare the loop with, and the way for the rare
passes that recompute a preempted request, whose frozen tokens lie in the midst of a chunk.

Shapes: T tokens, A active tokens, B rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, override_forward_context

from exitserve.engine.compat import batch_shape, can_narrow, narrowed_context, refuse_unsupported
from exitserve.engine.compiled import Segment, Stream, compiled_segment
from exitserve.engine.head import CheckedHead
from exitserve.engine.options import options_of
from exitserve.engine.plan import ActiveRows, Candidate, StepPlan, merge_logits
from exitserve.engine.propagation import Propagation
from exitserve.engine.rows import rows_of


class MultiExitMixin:
    """Makes a vLLM decoder stop early; put it, with a `Family`, before the vLLM class."""

    def __init__(self, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        parent: Any = super()  # the vLLM class, to which this is a mixin
        parent.__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
        self._rows = rows_of(vllm_config)
        exit_layers = self._rows.rules.exit_layers
        if exit_layers:
            refuse_unsupported(vllm_config)
        model: Any = self
        self._masked = options_of(vllm_config).get("exit_path") == "masked"
        self._head = CheckedHead(model, parent.compute_logits, self._rows.eos_token_ids)
        layers = model.decoder_layers()
        self._layers: tuple[Any, ...] = tuple(layers)  # a tuple, as in Segment
        self._segments: tuple[Segment, ...] = ()
        if exit_layers:
            self._segments = tuple(
                compiled_segment(vllm_config, layers, start, end, model.run_layer)
                for start, end in pairwise([0, *exit_layers, len(layers)])
            )
        self._propagation: Propagation | None = None
        self._plan: StepPlan | None = None

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Runs each row to its own depth; returns normed states [T, D]."""
        model: Any = self
        shape = batch_shape()
        plan = self._plan = None if shape is None else self._rows.plan(shape, positions)
        if plan is None and self._segments:
            self._warm_up(model.embed(input_ids, positions, inputs_embeds), positions)
        if plan is None or plan.is_plain():
            # Where nobody may exit, the pass is vLLM's own, bit for bit.
            own: Any = super().forward  # type: ignore[misc]  # from the vLLM class
            normed: Tensor = own(input_ids, positions, intermediate_tensors, inputs_embeds)
        else:
            hidden: Tensor = model.embed(input_ids, positions, inputs_embeds)
            if plan.known_depth is not None or self._masked or not can_narrow():
                normed = self._run_masked(positions, hidden, plan)
            else:
                with ExitStack() as contexts:
                    normed = self._run(positions, hidden, plan, contexts)
        if plan is not None:
            self._rows.record(plan)
        return normed

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

    def _load_propagation(self, like: Tensor) -> Propagation:
        if self._propagation is None:  # weights are there once the first pass runs
            model: Any = self
            layers = [model.layer_kv(layer) for layer in self._layers]
            self._propagation = Propagation(layers, self._rows.rules.exit_layers, like)
        return self._propagation

    def _run(
        self, positions: Tensor, hidden: Tensor, plan: StepPlan, contexts: ExitStack
    ) -> Tensor:
        """The loop over segments."""
        model: Any = self
        propagation = self._load_propagation(hidden)
        active = ActiveRows(plan.row_ends)
        stream: Stream = (hidden, None)
        left: Tensor | None = None  # [T, D] normed states of rows that exited
        for segment in self._segments:
            stream = segment(positions, *stream)
            if not (due := plan.due(segment.end)):
                continue
            total = _total(stream)
            places = active.last_tokens([one.row for one in due])
            normed, passed = self._check(total, places, due, segment.end, plan)
            if not passed:
                continue
            some = places[passed]
            everything = some.shape[0] == total.shape[0]
            propagation.fill(
                total if everything else total[some],
                positions if everything else positions[some],
                segment.end,
                None if everything else some,
            )
            if everything and left is None:
                return normed
            left = torch.zeros_like(hidden) if left is None else left
            left[some if active.tokens is None else active.tokens[some]] = normed[passed]
            if everything:
                return left
            kept_rows, kept = active.drop([due[index].row for index in passed])
            contexts.enter_context(override_forward_context(narrowed_context(kept_rows, kept)))
            positions, stream = positions[kept], (stream[0][kept], _select(stream[1], kept))
        final: Tensor = model.final_norm(*stream)
        if left is None:
            return final
        assert active.tokens is not None
        return left.index_copy_(0, active.tokens, final)

    def _check(
        self, total: Tensor, places: Tensor, due: list[Candidate], layer: int, plan: StepPlan
    ) -> tuple[Tensor, list[int]]:
        """Exit check after `layer` layers.

        Args:
            total: [A, D] residual stream of the active tokens.
            places: [N] which of them are checked.
            due: [N] the rows they belong to.
            layer: the exit layer.
            plan: takes the outcome.

        Returns:
            Normed states [N, D] of those checked, and indices within `due` of those that exit.
        """
        model: Any = self
        rows = total if places.shape[0] == total.shape[0] else total[places]
        normed: Tensor = model.final_norm(rows, None)
        # Who exits unconditionally needs no check, and gets logits with the others at the end.
        asked = [index for index, one in enumerate(due) if not one.is_sure(layer)]
        exits = [True] * len(due)
        if asked:
            some = normed if len(asked) == len(due) else normed[asked]
            confidence, ends, logits = self._head.check(some)
            decided = plan.decide([due[index] for index in asked], layer, confidence, ends)
            gone = [due[i].row for i, leaves in zip(asked, decided, strict=True) if leaves]
            if gone:
                plan.keep_logits(gone, self._head.logits_of(logits, decided))
            for index, leaves in zip(asked, decided, strict=True):
                exits[index] = leaves
        passed = [index for index, leaves in enumerate(exits) if leaves]
        plan.depth.update((due[index].row, layer) for index in passed)
        self._rows.recorder.checked(layer, len(due), len(passed), head_passes=bool(asked))
        return normed, passed

    def _run_masked(self, positions: Tensor, hidden: Tensor, plan: StepPlan) -> Tensor:
        """All rows through all layers; frozen tokens are restored after each."""
        model: Any = self
        active = ActiveRows(plan.row_ends)
        frozen = hidden.new_zeros((hidden.shape[0], 1), dtype=torch.bool)
        state, left = torch.zeros_like(hidden), torch.zeros_like(hidden)
        stream: Stream = (hidden, None)
        for depth, layer in enumerate(self._layers, start=1):
            stream = model.run_layer(layer, positions, stream)
            total = torch.where(frozen, state, _total(stream))
            freezing = torch.zeros_like(frozen)
            if plan.known_depth is not None and depth < len(self._layers):
                freezing |= (plan.known_depth == depth)[:, None]
            if due := plan.due(depth):
                places = active.last_tokens([one.row for one in due])
                normed, passed = self._check(total, places, due, depth, plan)
                freezing[places[passed]] = True
                left[places[passed]] = normed[passed]
            state = torch.where(freezing, total, state)
            frozen = frozen | freezing
            stream = _restored(stream, frozen, state)
        return torch.where(frozen, left, model.final_norm(*stream))

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits of the sampled rows [B, D]: a successful check's own, else the head's."""
        compute: Any = super().compute_logits  # type: ignore[misc]  # from the vLLM class
        plan, self._plan = self._plan, None  # prompt logprobs call again, for other states
        num_rows = hidden_states.shape[0]
        if plan is None or not plan.depth or num_rows != plan.row_ends.shape[0]:
            return compute(hidden_states)  # type: ignore[no-any-return]
        rest = plan.without_logits(num_rows)
        if rest and len(plan.depth) == num_rows:
            # All rows left early, some unconditionally: this is the head of their exit.
            self._rows.recorder.head_passes += 1
        if len(rest) == num_rows:
            return compute(hidden_states)  # type: ignore[no-any-return]
        return merge_logits(plan, compute(hidden_states[rest]) if rest else None, num_rows)


def _total(stream: Stream) -> Tensor:
    """The residual stream [T, D] itself."""
    hidden, residual = stream
    return hidden if residual is None else hidden + residual


def _select(tensor: Tensor | None, tokens: Tensor) -> Tensor | None:
    return None if tensor is None else tensor[tokens]


def _restored(stream: Stream, frozen: Tensor, state: Tensor) -> Stream:
    """Sets frozen tokens to their state, and leaves the others bit for bit.

    Args:
        stream: [T, D]; a pair becomes (0, state).
        frozen: [T, 1] bool.
        state: [T, D].
    """
    hidden, residual = stream
    if residual is None:
        return torch.where(frozen, state, hidden), None
    return hidden.masked_fill(frozen, 0.0), torch.where(frozen, state, residual)
