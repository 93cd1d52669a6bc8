"""Requests whose exits the device decides: who may exit in a pass, and what came of it.

The host fills in a pass before it runs (`begin`), asks for its outcome once it is under way
(`end`), and reads that when it has arrived, a pass or two later: nothing waits.

Shapes: B rows, T tokens, E exit layers, V / R vocabulary of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from exitserve.engine.early_exit.device.rows import DeviceRows, HostRow, Put, Slots
from exitserve.engine.request import PreemptedRequests, Request, RunningRequests
from exitserve.engine.state import EngineState
from exitserve.engine.transfers import Arrivals
from exitserve.policy import EXACT, ExitPolicy


@dataclass(frozen=True)
class PassRows:
    """The rows of a pass, as the host knows them. Lists are [B]."""

    slots: Sequence[int]
    names: Sequence[str]
    """vLLM's internal request ids."""
    computed: Sequence[int]
    """Tokens that were computed before."""
    scheduled: Sequence[int]
    """Tokens of this pass."""
    known: Sequence[int]
    """Tokens that were known when the request came (again); the rest it generated since."""
    padded: int
    """Rows of the graph that runs, B or more."""
    padded_tokens: int
    """T, padding included."""


class DeviceRequests(RunningRequests):
    """All requests of an engine, by slot."""

    def __init__(
        self, state: EngineState, most_rows: int, logits: Tensor, device: torch.device, put: Put
    ) -> None:
        """Makes room.

        Args:
            state: the engine's.
            most_rows: requests that run together.
            logits: [most_rows, V / R] room for those of a pass.
            device: where the model is.
            put: see `ExitHead.put`.
        """
        self._rules, self._recorder = state.rules, state.recorder
        self._slots = Slots(state.rules, most_rows, device)
        self.rows = DeviceRows(self._slots, most_rows, state.rules.num_layers, logits, put)
        self.by_slot: dict[int, Request] = {}
        """Those that run."""
        self.preempted = PreemptedRequests()
        self._due: list[tuple[Request, int, int]] = []
        self._arrivals = Arrivals()
        self._plain_passes = 0
        """Passes that were vLLM's own."""
        state.requests = self

    def add(self, slot: int, request: Request) -> None:
        """Takes a request into a slot; one that was here before goes on where it stopped."""
        earlier = self.preempted.take(request.name)
        if earlier is not None:
            request = earlier
            self._arrivals.drain(wait=True)  # its tokens are computed again, each to its own depth
        self.by_slot[slot] = request
        if request.policy.mode in EXACT:  # refused at the front door
            request.policy = ExitPolicy.off()
        if self._may_exit(request):
            self._slots.start(slot, request.policy)

    def remove(self, name: str) -> None:
        """Lets a request go: it has ended, or is preempted."""
        slot = next((slot for slot, one in self.by_slot.items() if one.name == name), None)
        if slot is not None:
            self.preempted.keep(self.by_slot.pop(slot))

    def _may_exit(self, request: Request) -> bool:
        """Whether a request asks for exits that there are. Of others, the device knows nothing."""
        return request.policy.mode != "off" and bool(self._rules.exit_layers)

    def begin(self, batch: PassRows, places: Tensor | None) -> None:
        """Fills in a pass; names that are not known, as in warm-ups, run at full depth.

        Args:
            batch: its rows.
            places: [B] each row's last token; None where every row has one token.
        """
        self._arrivals.drain(wait=False)
        full = self._rules.num_layers
        may_exit, self._due = [False] * len(batch.slots), []
        depths: dict[int, int] = {}  # of tokens that were computed before, where not full
        start = 0
        for row, slot in enumerate(batch.slots):
            first, length = batch.computed[row], batch.scheduled[row]
            begins, start = start, start + length  # of the row's tokens in the pass
            request = self.by_slot.get(slot)
            if request is None or request.name != batch.names[row]:
                continue
            generated = first + length - request.prompt_length
            samples = first + length >= batch.known[row]
            if samples and generated >= 0:
                self._due.append((request, generated, row))
            if not self._may_exit(request):
                continue
            may_exit[row] = samples and generated >= 1
            last = first + length - int(samples)
            for position in range(max(first, request.prompt_length), last):
                index = position + 1 - request.prompt_length
                if index < len(request.depths) and request.depths[index] < full:
                    depths[begins + position - first] = request.depths[index]
        if not depths and not any(may_exit):
            self.rows.begin((), batch.padded)
            return
        padding, known_depth = None, None
        if places is not None:
            if depths:
                known_depth = [depths.get(at, full) for at in range(batch.padded_tokens)]
            if batch.padded_tokens > start:
                padding = torch.arange(batch.padded_tokens, device=places.device) >= start
        whole = {slot for slot, one in self.by_slot.items() if one.needs_whole_head}
        rows = [
            HostRow(slot, may_exit[row], depths.get(row, full), slot in whole)
            for row, slot in enumerate(batch.slots)
        ]
        self.rows.begin(rows, batch.padded, places, padding, known_depth)

    def end(self) -> None:
        """Asks for the outcome of the pass that is under way."""
        take = partial(self._count, self._due)
        self._due = []
        if self.rows.may_differ:
            self._arrivals.ask(self.rows.depth, take)
        else:
            self._plain_passes += 1
            self._arrivals.then(take)

    def _count(self, due: list[tuple[Request, int, int]], depths: list[int] | None) -> None:
        """Counts the generated tokens of a pass: requests, the index of their token, their row.
        Without depths [B] of the rows, all ran all layers."""
        full = self._rules.num_layers
        for request, index, row in due:
            depth = full if depths is None else depths[row]
            request.note_depth(index, depth, full)
            self._recorder.tokens_by_depth[depth] += 1
            self._recorder.frozen_tokens += depth < full
            if request.trace_keys:
                self._recorder.trace(request.trace_keys, request.name, index, depth)

    def update_counts(self) -> None:
        """See `RunningRequests`; waits for the device.

        Of vLLM's own passes the host knows what they read; of the others the device counted.
        """
        self._arrivals.drain(wait=True)
        recorder, heads = self._recorder, 0
        checks = self.rows.checks.tolist()
        for layer, counts in zip(self._rules.exit_layers, checks, strict=True):
            made, passed, head_passes = counts
            recorder.checks[layer], recorder.passed[layer] = made, passed
            heads += head_passes
        layers, final_heads = self.rows.reads.tolist()
        recorder.head_passes = heads
        recorder.layer_reads = layers + self._plain_passes * self._rules.num_layers
        recorder.final_heads = final_heads + self._plain_passes
