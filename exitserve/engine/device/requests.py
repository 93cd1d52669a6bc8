"""Requests whose exits the device decides: who may exit in a pass, and what came of it.

The host fills in a pass before it runs (`begin`), asks for its outcome once it is under way
(`ended`), and reads that when it has arrived (`drain`), a pass or two later: nothing waits.

Shapes: B rows, T tokens, E exit layers.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exitserve.engine.device.rows import DeviceRows, RowTold, Slots
from exitserve.engine.forced import Forced
from exitserve.engine.recorder import Recorder
from exitserve.policy import EXACT, ExitPolicy, ExitRules

if TYPE_CHECKING:
    from exitserve.engine.host.rows import HostRows

MOST_GONE = 4096
"""Requests remembered after they left, should they come back after a preemption."""


@dataclass
class Known:
    """One request."""

    request_id: str
    policy: ExitPolicy
    prompt_length: int
    trace_key: str | None
    depths: list[int] = field(default_factory=list)
    """Depth of each generated token, by its index."""
    kept: Tensor | None = None
    """See `Slots.kept`, while it has no slot."""
    prompt_hash: int = 0
    """For `Forced`."""

    @classmethod
    def of(cls, name: str, params: Any, prompt_length: int | None, rules: ExitRules) -> Known:
        """Reads vLLM's SamplingParams.

        Args:
            name: the request's.
            params: its parameters.
            prompt_length: tokens; None for prompts given as embeddings, which run at full depth.
            rules: the model's.
        """
        fields = params.extra_args or {}
        policy = rules.policy_or_off(fields, structured=params.structured_outputs is not None)
        if prompt_length is None or policy.mode in EXACT:  # which the front door refuses
            policy = ExitPolicy.off()
        trace = fields.get("exit_trace")
        return cls(
            request_id=name,
            policy=policy,
            prompt_length=prompt_length or 0,
            trace_key=trace if isinstance(trace, str) else None,
        )

    def note(self, index: int, depth: int, full_depth: int) -> None:
        """Keeps the depth of generated token `index`; earlier gaps ran at full depth."""
        self.depths += [full_depth] * (index - len(self.depths))
        self.depths[index:] = [depth]


@dataclass(frozen=True)
class PassRows:
    """The rows of a pass, as the host knows them. Lists are [B]."""

    slots: Sequence[int]
    request_ids: Sequence[str]
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


@dataclass(frozen=True)
class _Outcome:
    """What a pass will have generated."""

    due: list[tuple[Known, int, int]]
    """Requests, the index of their generated token, their row."""
    depth: Tensor | None
    """[B] on the host, once `arrived`; None: all ran all layers."""
    arrived: Any
    """A CUDA event; None where the copy is done."""


class DeviceRequests:
    """All requests of an engine that runs `DeviceRows`."""

    def __init__(
        self,
        rules: ExitRules,
        slots: Slots,
        rows: DeviceRows,
        recorder: Recorder,
        forced: Forced | None,
    ) -> None:
        self._rules, self._slots, self.rows, self._recorder = rules, slots, rows, recorder
        self._by_slot: dict[int, Known] = {}
        self._gone: OrderedDict[str, Known] = OrderedDict()
        self._due: list[tuple[Known, int, int]] = []
        self._late: deque[_Outcome] = deque()
        self._forced = forced
        self._own_passes = 0
        """Passes that were vLLM's own."""

    def add(self, slot: int, request: Known) -> None:
        """Takes a request into a slot; one that was here before goes on where it stopped."""
        known = self._gone.pop(request.request_id, request)
        if known is not request:
            self.drain(wait=True)  # its tokens are computed again, each to its own depth
        self._by_slot[slot] = known
        if self._exits(known):
            self._slots.start(slot, known.policy, known.kept)

    def remove(self, request_id: str) -> None:
        """Lets a request go: it has ended, or is preempted."""
        for slot, known in self._by_slot.items():
            if known.request_id == request_id:
                del self._by_slot[slot]
                if self._exits(known):
                    known.kept = self._slots.kept(slot)
                self._gone[request_id] = known
                if len(self._gone) > MOST_GONE:
                    self._gone.popitem(last=False)
                return

    def _exits(self, known: Known) -> bool:
        """Whether a request asks for exits that there are. Of others, the device knows nothing."""
        return known.policy.mode != "off" and bool(self._rules.exit_layers)

    def begin(self, batch: PassRows, places: Tensor | None) -> None:
        """Fills in a pass; names that are not known, as in warm-ups, run at full depth.

        Args:
            batch: its rows.
            places: [B] each row's last token; None where every row has one token.
        """
        self.drain(wait=False)
        full = self._rules.num_layers
        may_exit, self._due = [False] * len(batch.slots), []
        depths: dict[int, int] = {}  # of tokens that were computed before, where not full
        start = 0
        for row, slot in enumerate(batch.slots):
            first, length = batch.computed[row], batch.scheduled[row]
            begins, start = start, start + length  # of the row's tokens in the pass
            known = self._by_slot.get(slot)
            if known is None or known.request_id != batch.request_ids[row]:
                continue
            generated = first + length - known.prompt_length
            samples = first + length >= batch.known[row]
            if samples and generated >= 0:
                self._due.append((known, generated, row))
            if not self._exits(known):
                continue
            may_exit[row] = samples and generated >= 1
            last = first + length - int(samples)
            for position in range(max(first, known.prompt_length), last):
                index = position + 1 - known.prompt_length
                if index < len(known.depths) and known.depths[index] < full:
                    depths[begins + position - first] = known.depths[index]
        if not depths and not any(may_exit):
            self.rows.begin((), batch.padded)
            return
        passes = self._lots(batch)
        padding, known_depth = None, None
        if places is not None:
            if depths:
                known_depth = [depths.get(at, full) for at in range(batch.padded_tokens)]
            if batch.padded_tokens > start:
                padding = torch.arange(batch.padded_tokens, device=places.device) >= start
        rows = [
            RowTold(slot, may_exit[row], depths.get(row, full), passes[row])
            for row, slot in enumerate(batch.slots)
        ]
        self.rows.begin(rows, batch.padded, places, padding, known_depth)

    def _lots(self, batch: PassRows) -> list[int]:
        """In benchmarks: which checks of a pass pass [B], bit by exit number."""
        found = [0] * len(batch.slots)
        if self._forced is None:
            return found
        nobody = Known("", ExitPolicy.off(), 0, None)
        hashes = [self._by_slot.get(slot, nobody).prompt_hash for slot in batch.slots]
        last = [a + b - 1 for a, b in zip(batch.computed, batch.scheduled, strict=True)]
        for index, layer in enumerate(self._rules.exit_layers):
            lots = [(*pair, layer) for pair in zip(hashes, last, strict=True)]
            for row, passed in enumerate(self._forced.passes(lots)):
                found[row] |= passed << index
        return found

    def ended(self) -> None:
        """Asks for the outcome of the pass that is under way."""
        depth, arrived = None, None
        if self.rows.may_differ:
            source = self.rows.depth
            depth = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            depth.copy_(source, non_blocking=True)
            if source.is_cuda:
                arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                arrived.record()
        else:
            self._own_passes += 1
        self._late.append(_Outcome(self._due, depth, arrived))
        self._due = []

    def drain(self, *, wait: bool) -> None:
        """Counts and traces what has arrived; with `wait`, all there is."""
        while self._late:
            one = self._late[0]
            if one.arrived is not None and not one.arrived.query():
                if not wait:
                    return
                one.arrived.synchronize()
            self._late.popleft()
            self._count(one)

    def _count(self, one: _Outcome) -> None:
        full = self._rules.num_layers
        depths = None if one.depth is None else one.depth.tolist()
        for known, index, row in one.due:
            depth = full if depths is None else depths[row]
            known.note(index, depth, full)
            self._recorder.generated(depth)
            self._recorder.froze(int(depth < full))
            if known.trace_key is not None:
                self._recorder.trace(known.trace_key, known.request_id, index, depth)

    def read_counts(self) -> None:
        """Brings the recorder's counts up to date; waits for the device.

        Of vLLM's own passes the host knows what they read; of the others the device counted.
        """
        self.drain(wait=True)
        recorder, heads = self._recorder, 0
        checks = self.rows.checks.tolist()
        for layer, (made, passed, head_passes) in zip(self._rules.exit_layers, checks, strict=True):
            recorder.checks[layer], recorder.passed[layer] = made, passed
            heads += head_passes
        layers, final_heads = self.rows.reads.tolist()
        recorder.head_passes = heads
        recorder.layer_reads = layers + self._own_passes * self._rules.num_layers
        recorder.final_heads = final_heads + self._own_passes


def device_requests(
    every: HostRows, model: Any, most_rows: int, device: torch.device
) -> DeviceRequests:
    """Makes room for the requests of an engine.

    Args:
        every: the engine's exit state.
        model: a `MultiExitMixin`.
        most_rows: requests that run together.
        device: where the model is.
    """
    slots = Slots(every.rules, most_rows, device)
    room = model.logits_room(most_rows, device)
    layers, forced = every.rules.num_layers, every.forced is not None
    rows = DeviceRows(slots, most_rows, layers, room, forced=forced)
    found = DeviceRequests(every.rules, slots, rows, every.recorder, every.forced)
    every.resident = found
    return found
