"""The loop on the device: one graph, whichever rows exit.

vLLM's runner V2 captures a model's forward pass once and replays it, so the graph holds both ways:
its own pass where no row may exit, and the masked loop. Outside of graphs the host, which knows
whether any row may, chooses. Either way the logits are ready when the pass is: those of a check
for the rows that passed it, the whole head's for the others, and for those that need them.

Shapes: T tokens, B rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, override_forward_context

from exitserve.engine.compat.context import without_reading_for
from exitserve.engine.early_exit.device.rows import DeviceRows
from exitserve.engine.early_exit.masked_loop import MaskedLoop, MaskedSegment, Room
from exitserve.engine.layers.branches import every_branch, when
from exitserve.engine.layers.exit_head import ExitHead
from exitserve.engine.layers.propagation import Propagation
from exitserve.engine.layers.segments import Segment


class DeviceLoop:
    """The passes of one model."""

    def __init__(
        self,
        segments: Sequence[Segment],
        head: ExitHead,
        propagation: Propagation,
        most_tokens: int,
    ) -> None:
        """Takes a model's parts, its segments masked; `most_tokens`: of a pass that is captured."""
        self._most_tokens = most_tokens
        self._room: Room | None = None
        self._segments, self._head = segments, head
        self._propagation = propagation
        self.attention_groups: Sequence[Sequence[Any]] = ()
        """vLLM's, of the pass to come; see `without_reading_for`."""
        self._rows: DeviceRows | None = None
        """Of all passes: what a graph was captured with is what it is replayed with."""

    def run(
        self,
        rows: DeviceRows | None,
        positions: Tensor,
        embed: Callable[[], Tensor],
        plain: Callable[[], Tensor],
    ) -> Tensor:
        """Runs a pass; returns normed states [T, D].

        Args:
            rows: its rows, filled in; None before there is a cache.
            positions: [T].
            embed: gives the first layer's input [T, D].
            plain: vLLM's own pass.
        """
        self._rows = rows
        if not self._segments:
            return plain()
        if rows is None or get_forward_context().attn_metadata is None:
            self._warm_up(positions, embed())
            return plain()
        if not rows.warms_up:
            return self._loop(positions, embed(), rows) if rows.may_differ else plain()
        hidden = embed()
        normed = torch.empty_like(hidden)

        def run_loop() -> None:
            with _fresh_context():
                normed.copy_(self._loop(positions, hidden, rows))

        def run_plain() -> None:
            with _fresh_context():
                normed.copy_(plain())

        any_may_exit = rows.any_may_exit
        with every_branch():
            when(~any_may_exit, run_plain)
            # The loop changes what attention reads of the pass (`without_reading_for`).
            when(any_may_exit, run_loop)
        return normed

    def _warm_up(self, positions: Tensor, hidden: Tensor) -> None:
        """Loads what propagation needs, makes room, and compiles the segments.

        vLLM plans its memory by the largest of these passes, so they hold what a loop would.
        """
        self._propagation.load(hidden)
        self._head.prepare(hidden.device)
        room = self._room_for(hidden)
        frozen, state = room.frozen[: len(hidden)].zero_(), room.state[: len(hidden)]
        after: Tensor | None = hidden
        residual: Tensor | None = None
        with _fresh_context():
            for segment in self._segments:
                assert after is not None, "not the last one before"
                _, after, residual = segment(positions, after, residual, frozen, state)

    def _loop(self, positions: Tensor, hidden: Tensor, rows: DeviceRows) -> Tensor:
        rows.start()
        loop = MaskedLoop(
            [MaskedSegment(one.end, one) for one in self._segments],
            self._head,
            self._propagation,
            lambda frozen: without_reading_for(frozen, self.attention_groups),
        )
        normed = loop.run(positions, hidden, rows, self._room_for(hidden))
        when(
            rows.needs_whole_head().any(),
            lambda: rows.take_last_logits(self._head.own_logits(normed[rows.places])),
        )
        return normed

    def _room_for(self, hidden: Tensor) -> Room:
        """For a pass of tokens [T, D]: always the same where a graph may hold it."""
        if self._room is None:
            self._room = Room(hidden.new_empty(self._most_tokens, hidden.shape[1]))
        return self._room if len(hidden) <= self._most_tokens else Room(hidden)

    def take_logits(self, count: int) -> Tensor | None:
        """The logits [B, V] of the first rows of the last pass, once; None if it left none."""
        rows = self._rows  # of the last capture too: a graph that is replayed runs no Python
        if rows is None or not rows.has_logits:
            return None
        rows.has_logits = False
        return self._head.gathered(rows.logits[:count])


def _fresh_context() -> AbstractContextManager[None]:
    """A forward context of its own: passes count their mixture-of-experts layers in it."""
    return override_forward_context(replace(get_forward_context()))
