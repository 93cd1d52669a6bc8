"""THE loop: run a segment, check, freeze, propagate.

A decoder of L layers with exit layers e1 < e2 < ... is run as segments (0, e1], (e1, e2], ...
After each exit layer the rows that may exit are checked; those that pass are frozen. When every
row of the batch is frozen, the rest of the cache is filled in one go and the pass ends; while
only some are, the next segment runs on all rows and restores the frozen ones after each layer,
so that their keys and values come from the frozen state. (Restoring is part of the compiled
segment, with an empty mask where nothing is frozen: a second compiled form would double the time
that a cold start spends compiling.)

vLLM carries the residual stream as a pair (hidden, residual) whose sum it is; the sum is taken
by the next norm. A frozen row is the pair (0, state).

Shapes: T tokens, B rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.backends import set_model_tag
from vllm.compilation.decorators import support_torch_compile
from vllm.logger import init_logger

from exitserve.confidence import exit_mask, max_prob
from exitserve.engine.compat import batch_shape, refuse_unsupported
from exitserve.engine.propagation import Propagation
from exitserve.engine.rows import StepPlan, rows_of

logger = init_logger(__name__)


class Segment(nn.Module):
    """Layers `start + 1 .. end` of a decoder. `compiled_segment` makes one."""

    def __init__(
        self, *, vllm_config: Any, prefix: str = "", layers: list[nn.Module], start: int, end: int
    ) -> None:
        super().__init__()
        # A tuple, not a ModuleList: the layers stay registered once, in vLLM's own model.
        self.layers = tuple(layers[start:end])
        self.end = end


def compiled_segment(vllm_config: Any, layers: list[nn.Module], start: int, end: int) -> Segment:
    """A segment that is compiled as one unit where vLLM compiles.

    vLLM's cache of compiled code knows a module by its forward's qualified name
    (`vllm/compilation/decorators.py`, `_model_hash_key`), so each segment gets a class and a name
    of its own: with a common one, a segment could be handed another's code.
    """
    name = f"segment_{start}_{end}"

    def forward(
        self: Segment,
        positions: Tensor,
        hidden: Tensor,
        residual: Tensor | None,
        frozen: Tensor | None,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
            if frozen is not None and state is not None:
                hidden, residual = _restore(hidden, residual, frozen, state)
        assert residual is not None
        return hidden, residual

    forward.__qualname__ = f"{name}.forward"
    arguments = ("positions", "hidden", "residual", "frozen", "state")
    decorate = support_torch_compile(dynamic_arg_dims={name: {0: "t"} for name in arguments})
    segment_class: Any = decorate(type(name, (Segment,), {"forward": forward}))
    with set_model_tag(name):
        segment: Segment = segment_class(
            vllm_config=vllm_config, prefix=name, layers=layers, start=start, end=end
        )
    return segment


class MultiExitMixin:
    """Makes a vLLM decoder stop early; put it before the vLLM class in the bases.

    Needs `self.model` with `layers` and `norm`, `embed_input_ids`, `lm_head` and
    `compute_logits`, as vLLM's Llama classes have them.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        parent: Any = super()  # the vLLM class, to which this is a mixin
        parent.__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
        self._rows = rows_of(vllm_config)
        exit_layers = self._rows.rules.exit_layers
        if exit_layers:
            refuse_unsupported(vllm_config)
        layers = list(self.model.layers)  # type: ignore[attr-defined]  # from the vLLM class
        bounds = [0, *exit_layers, len(layers)]
        # Held in a tuple for the reason given in Segment.
        self._segments: tuple[Any, ...] = tuple(
            compiled_segment(vllm_config, layers, start, end) for start, end in pairwise(bounds)
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
        if self._propagation is None and len(self._segments) > 1:
            self._propagation = Propagation(list(model.model.layers), self._segments[0].end)
        hidden = inputs_embeds if inputs_embeds is not None else model.embed_input_ids(input_ids)
        normed = self._run(positions, hidden, plan)
        if plan is not None:
            self._rows.record(plan)
        return normed

    def _run(self, positions: Tensor, hidden: Tensor, plan: StepPlan | None) -> Tensor:
        """The loop over segments."""
        model: Any = self
        residual: Tensor | None = None
        frozen: Tensor | None = None  # [T, 1] rows frozen so far
        state: Tensor | None = None  # [T, D] their states; other rows are not read
        last = len(self._segments) - 1
        for index, segment in enumerate(self._segments):
            if index and frozen is None and not segment.do_not_compile:
                # What is compiled once with tensors must always be called with tensors.
                frozen = hidden.new_zeros((hidden.shape[0], 1), dtype=torch.bool)
                state = torch.zeros_like(hidden)
            hidden, residual = segment(positions, hidden, residual, frozen, state)
            if (
                plan is None
                or index == last
                or not (tokens := plan.candidates(segment.end)).numel()
            ):
                continue
            stream = hidden + residual
            normed = self._check(stream, tokens, segment.end, plan)
            if bool(plan.frozen.all()):
                assert self._propagation is not None
                # Rows frozen earlier propagated up to this layer already, from the state that
                # `stream` still holds for them.
                self._propagation.fill(stream, positions, segment.end)
                return normed if tokens.numel() == stream.shape[0] else model.model.norm(stream)
            if bool(plan.frozen.any()):
                frozen, state = plan.frozen[:, None], stream
                hidden, residual = _restore(hidden, residual, frozen, state)
        final, _ = model.model.norm(hidden, residual)
        return final  # type: ignore[no-any-return]

    def _check(self, stream: Tensor, tokens: Tensor, layer: int, plan: StepPlan) -> Tensor:
        """Exit check of `tokens` [N]: freezes those that pass; returns their normed states."""
        model: Any = self
        rows = stream if tokens.numel() == stream.shape[0] else stream[tokens]
        normed: Tensor = model.model.norm(rows)
        logits = super().compute_logits(normed)  # type: ignore[misc]  # from the vLLM class
        token, confidence = max_prob(logits)
        threshold, eos_threshold = plan.thresholds_of(layer, tokens)
        exits = exit_mask(token, confidence, threshold, eos_threshold, self._rows.eos_token_ids)
        passed = int(exits.sum())
        self._rows.recorder.checked(layer, tokens.numel(), passed)
        if passed == tokens.numel():
            plan.freeze(tokens, layer, logits)
        elif passed:
            plan.freeze(tokens[exits], layer, logits[exits])
        return normed

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits of the sampled rows [B, D]: a successful check's own, else the head's."""
        compute: Callable[[Tensor], Tensor | None] = super().compute_logits  # type: ignore[misc]
        plan, self._plan = self._plan, None  # prompt logprobs call again, for other states
        if plan is None or not plan.logits or hidden_states.shape[0] != plan.row_ends.shape[0]:
            return compute(hidden_states)
        return _merge_logits(plan, hidden_states, compute)


def _restore(
    hidden: Tensor, residual: Tensor, frozen: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Sets frozen rows to the pair (0, state); leaves the others bit for bit.

    Args:
        hidden: [T, D].
        residual: [T, D].
        frozen: [T, 1] bool.
        state: [T, D].
    """
    return hidden.masked_fill(frozen, 0.0), torch.where(frozen, state, residual)


def _merge_logits(
    plan: StepPlan, hidden_states: Tensor, compute: Callable[[Tensor], Tensor | None]
) -> Tensor | None:
    """Puts kept check logits and freshly computed ones into row order."""
    ends = plan.row_ends.long() - 1
    exited = plan.frozen[ends]
    if bool(exited.all()) and len(plan.logits) == 1 and torch.equal(plan.logits[0][0], ends):
        return plan.logits[0][1]
    kept_logits = torch.cat([logits for _, logits in plan.logits])
    slot = torch.zeros(plan.frozen.shape[0], dtype=torch.long)
    slot[torch.cat([tokens for tokens, _ in plan.logits])] = torch.arange(kept_logits.shape[0])
    merged = kept_logits.new_empty((ends.shape[0], kept_logits.shape[1]))
    merged[exited] = kept_logits[slot[ends[exited]]]
    if not bool(exited.all()):
        fresh = compute(hidden_states[~exited])
        assert fresh is not None
        merged[~exited] = fresh
    return merged
