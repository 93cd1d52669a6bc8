"""Requests whose tokens may stand without a judge, and how deep each token of a pass was.

The host knows who asked for what; which tokens stand, and how many drafts were accepted, only the
device knows when the next pass is prepared. So a pass leaves its outcome in one small tensor, which
is copied while later passes run and counted when it has arrived.

Shapes: B rows, S sampled positions (B and all drafts), K drafts at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from exitserve.engine.requests import Request, RequestSlots
from exitserve.engine.state import EngineState
from exitserve.engine.transfers import Arrivals, upload
from exitserve.policy import NEVER


@dataclass(frozen=True)
class Judged:
    """The sampled positions of a pass in which tokens may stand."""

    places: Tensor
    """[S] where they are in the pass."""
    thresholds: Tensor
    """[S] for any token; never, where full depth decides."""
    end_thresholds: Tensor
    """[S] for ends of sequence."""
    stands: Tensor
    """[S] bool, takes which tokens stand."""


@dataclass(frozen=True)
class Sampled:
    """The sampled positions of a pass, as vLLM's runner V2 has them."""

    slots: Sequence[int]
    """[B] of its rows."""
    names: Sequence[str]
    """[B] vLLM's internal request ids."""
    drafts: Sequence[int]
    """[B] how many drafts of each row are judged."""
    places: Tensor
    """[S] where the positions are in the pass."""
    slot_of: Tensor
    """[S] each one's request."""
    ends: Tensor
    """[B + 1] where each row's positions begin, and where the last ones end."""
    positions: Tensor
    """[T] of all tokens, in their sequences."""
    prompt_lengths: Tensor
    """[slots] of the requests' prompts."""
    known_ids: Tensor
    """[slots, longest] all tokens of the requests, those that the pass samples once it has."""


class RailsRequests:
    """All requests of an engine that drafts, by slot."""

    def __init__(self, state: EngineState, most_rows: int, device: torch.device) -> None:
        """Makes room.

        Args:
            state: the engine's.
            most_rows: requests that run together.
            device: where the model is.
        """
        self._rules, self._recorder = state.rules, state.recorder
        (self._layer,) = state.rules.exit_layers
        self._limits = torch.full((most_rows, 2), NEVER, device=device)
        """Thresholds of each slot, for any token and for ends of sequence."""
        self._may_stand: set[int] = set()
        """Slots whose requests have thresholds."""
        self.running = RequestSlots()
        self._sampled: Sampled | None = None
        self._stands: Tensor | None = None
        self._arrivals = Arrivals()
        state.requests = self

    def add(self, slot: int, request: Request) -> None:
        """Takes a request into a slot; one that was here before goes on where it stopped."""
        request, _ = self.running.add(slot, request)
        if request.policy.mode == "defer":
            self._may_stand.add(slot)
            upload(request.policy.thresholds_at(self._layer), self._limits[slot])
        elif slot in self._may_stand:  # by the request that was there before
            self._may_stand.remove(slot)
            upload((NEVER, NEVER), self._limits[slot])

    def remove(self, name: str) -> None:
        """Lets a request go: it has ended, or is preempted."""
        self.running.remove(name)

    def forget(self, names: Iterable[str]) -> None:
        """Drops what is kept of requests that have ended, also while they were preempted."""
        self.running.forget(names)

    def begin(self, sampled: Sampled) -> Judged | None:
        """Takes the positions that a pass samples at; returns them if a token may stand there."""
        self._arrivals.drain(wait=False)
        self._sampled, self._stands = sampled, None
        if not self._may_stand.intersection(sampled.slots):
            return None
        self._stands = torch.zeros_like(sampled.slot_of, dtype=torch.bool)
        slots, places = sampled.slot_of.long(), sampled.places.long()
        lengths = sampled.prompt_lengths[slots]
        # The first generated token is full depth's, in every mode.
        thresholds = torch.where(
            (sampled.positions[places] >= lengths)[:, None], self._limits[slots], NEVER
        )
        return Judged(places, thresholds[:, 0], thresholds[:, 1], self._stands)

    def end(self, num_sampled: Tensor) -> None:
        """Asks for the outcome of the pass that is under way.

        Args:
            num_sampled: [B] tokens that each row generated.
        """
        sampled, self._sampled = self._sampled, None
        if sampled is None:
            return
        self._recorder.count_layers(self._rules.num_layers)
        self._recorder.final_heads += 1
        rows = [
            (self.running.get(slot, name), drafts)
            for slot, name, drafts in zip(sampled.slots, sampled.names, sampled.drafts, strict=True)
        ]
        self._arrivals.ask(self._found(sampled, num_sampled), partial(self._take, rows))

    def _found(self, sampled: Sampled, num_sampled: Tensor) -> Tensor:
        """[B, 2 + 2 (K + 1)]: the index of the first generated token, how many there are, then each
        one's id, and whether it stands."""
        starts = sampled.ends[:-1].long()
        slots = sampled.slot_of[starts].long()
        position = sampled.positions[sampled.places[starts].long()].long() + 1
        steps = torch.arange(1 + max(sampled.drafts, default=0), device=starts.device)
        ids = sampled.known_ids
        tokens = ids[slots[:, None], (position[:, None] + steps).clamp(max=ids.shape[1] - 1)]
        stands = torch.zeros_like(tokens)
        if self._stands is not None:
            places = (starts[:, None] + steps).clamp(max=len(self._stands) - 1)
            stands = self._stands[places]
        index = position - sampled.prompt_lengths[slots]
        parts = (index[:, None], num_sampled[: len(slots), None], tokens, stands)
        return torch.cat([part.long() for part in parts], dim=1)

    def _take(
        self, rows: Sequence[tuple[Request | None, int]], found: Sequence[Sequence[int]]
    ) -> None:
        """Counts and traces a pass.

        Args:
            rows: each row's request, None in warm-ups, and how many drafts it had.
            found: see `_found`.
        """
        checks = passed = 0
        for (request, drafts), (index, count, *pairs) in zip(rows, found, strict=True):
            if request is None or not count:
                continue
            tokens, stands = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
            if request.policy.mode == "defer" and index > 0:
                checks += 1 + drafts
                passed += sum(stands[: 1 + drafts])
            self._recorder.count_judged(drafts, count - 1)
            self._count(request, index, zip(tokens[:count], stands, strict=False))
        if checks:
            self._recorder.count_checks(self._layer, checks, passed)

    def _count(self, request: Request, index: int, tokens: Iterable[tuple[int, int]]) -> None:
        """Counts generated tokens, given as ids and whether they stand, from `index` on."""
        full = self._rules.num_layers
        for number, (token, stands) in enumerate(tokens, index):
            if number >= request.max_tokens:
                return  # the pass went on past the end
            depth = self._layer if stands else full
            request.note_depth(number, depth, full)
            self._recorder.count_token(depth)
            if request.trace_keys:
                self._recorder.trace(request.trace_keys, request.name, number, depth)
            if token in request.stop_ids:
                return

    def update_counts(self) -> None:
        """See `RunningRequests`; waits for the device."""
        self._arrivals.drain(wait=True)
