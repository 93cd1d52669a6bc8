"""The passes of a model that drafts with its first layers.

In mode "defer" a pass keeps every token's state after the draft layer. A token whose state there is
confident is final: the sampler gets the logits of that state in place of full depth's, those that
the check read, or the whole head's where the request needs them. So drafts
above the threshold are accepted, whatever full depth would say, and also the token that follows the
last draft may be final. Keys and values are full depth's throughout. Where no token may be final,
the pass is vLLM's own; but a GPU replays one graph for all passes.

What a request gets does not depend on how many tokens were drafted, nor on which: full depth or
the state at the draft layer decides each token by itself (`exitserve.reference`, mode "defer").

Shapes: T tokens, S sampled positions, D hidden, V vocabulary, R tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from exitserve.engine.drafting.requests import Judged
from exitserve.engine.layers.exit_head import ExitHead
from exitserve.engine.layers.segments import Segment


class DraftingLoop:
    """The forward passes of one model."""

    def __init__(
        self,
        model: Any,
        segments: Sequence[Segment],
        head: ExitHead,
        most_tokens: int,
        *,
        in_graphs: bool,
    ) -> None:
        """Takes a `MultiExitMixin`, its layers up to the draft layer and beyond it, and whether
        passes are replayed from graphs, as runner V2 does."""
        self._model, self.head = model, head
        self._in_graphs = in_graphs
        self._first, self._rest = segments
        self._most_tokens = most_tokens
        self._room: _Room | None = None
        self._judged: Judged | None = None

    @property
    def draft_layer(self) -> int:
        """How many layers a draft runs."""
        return self._first.end

    @property
    def attention_layers(self) -> set[str]:
        """vLLM's names of the attention in the layers that drafts run."""
        layers = self._model.decoder_layers()[: self.draft_layer]
        parts = (part for layer in layers for part in layer.modules())
        return {part.layer_name for part in parts if isinstance(part, AttentionLayerBase)}  # type: ignore[attr-defined]  # each has one

    @property
    def requests(self) -> Any:
        """The engine's requests, by slot."""
        return self._model.exit_state.requests

    def count_drafts(self, count: int) -> None:
        """Counts what so many drafts of a step read."""
        recorder = self._model.exit_state.recorder
        recorder.layer_reads += count * self.draft_layer
        recorder.head_passes += count

    def run(
        self, positions: Tensor, embed: Callable[[], Tensor], plain: Callable[[], Tensor]
    ) -> Tensor:
        """Runs a pass; returns normed states [T, D].

        Args:
            positions: [T].
            embed: gives the first layer's input [T, D].
            plain: vLLM's own pass.
        """
        if self._in_graphs:
            return self._run_keeping(positions, embed())
        context = get_forward_context()
        if context.attn_metadata is None:  # a warm-up, which compiles both
            # Passes count their mixture-of-experts layers in the forward context.
            with override_forward_context(replace(context)):
                self._run_keeping(positions, embed())
            return plain()
        return plain() if self._judged is None else self._run_keeping(positions, embed())

    def _run_keeping(self, positions: Tensor, hidden: Tensor) -> Tensor:
        """Runs embedded tokens [T, D], and keeps their states after the draft layer."""
        if self._room is None:
            self.head.prepare(hidden.device)
            self._room = _Room(hidden.new_empty(self._most_tokens, hidden.shape[1]))
        room = self._room
        states, after, residual = self._first(positions, _kept(hidden, room.hidden), None)
        _kept(states, room.states)
        if residual is not None:
            residual = _kept(residual, room.residual)
        normed: Tensor = self._rest(positions, _kept(after, room.hidden), residual)[0]
        return normed

    def draft(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Runs tokens [T] through the first layers; returns normed states [T, D]."""
        hidden = self._model.embed(input_ids, positions, None)
        normed: Tensor = self._first(positions, hidden, None)[0]
        return normed

    def judge(self, judged: Judged | None) -> None:
        """Says which positions the pass that comes samples at, if any token may be final there."""
        self._judged = judged

    def logits(self, normed: Tensor, compute: Callable[[Tensor], Tensor | None]) -> Tensor | None:
        """Logits of the sampled positions [S, D]: full depth's, or those of tokens that are final.

        Args:
            normed: [S, D].
            compute: the model's own head, of normed states.
        """
        judged, self._judged = self._judged, None  # prompt logprobs call again, for other states
        if judged is None:
            return compute(normed)
        assert self._room is not None
        states, head = self._room.states[judged.places], self.head
        *limits, needs_whole_head = judged.limits.unbind(dim=1)
        if head.reads_whole_logits:  # one read of the head for both
            found, both = head.check(torch.cat([states, normed]), *limits)
            own, logits = both[: len(states)], both[len(states) :]
            judged.is_final.copy_(found.exits)
            return torch.where(found.exits[:, None], own, logits)
        found, own = head.check(states, *limits)
        judged.is_final.copy_(found.exits)
        by_whole_head = found.exits & (needs_whole_head > 0)
        logits = head.own_logits(torch.where(by_whole_head[:, None], states, normed))
        head.put(own, found.exits & ~by_whole_head, logits)
        return head.gathered(logits)


class _Room:
    """Where a pass keeps what it hands on, [most_tokens, D] each: what goes into a segment, and the
    states after the draft layer, normed.

    A graph that is replayed reads and writes where it was captured. Of a segment that is captured
    in pieces, what goes in must lie at one place, and what comes out lies where later pieces put
    theirs (`vllm/compilation/cuda_graph.py`).
    """

    def __init__(self, like: Tensor) -> None:
        self.hidden, self.residual, self.states = (torch.empty_like(like) for _ in range(3))


def _kept(given: Tensor, place: Tensor) -> Tensor:
    """What was given [T, ...], at the place where it is kept."""
    return place[: len(given)].copy_(given)
