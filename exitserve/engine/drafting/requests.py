"""Requests of an engine that drafts: which tokens may be final without full depth, and the counts.

Both runners know their requests by a number: runner V1 by the row of its batch, runner V2 by a
slot. On a GPU only the device knows which tokens are final, and how many drafts were accepted, when
the next pass is prepared. So a pass leaves its outcome in one small tensor, which is copied while
later passes run, and counted when it has arrived.

Shapes: B rows, T tokens, S sampled positions (B and all drafts), K drafts at most.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exitserve.engine.request import Request, RunningRequests, read_request
from exitserve.engine.state import EngineState
from exitserve.engine.transfers import Arrivals, upload
from exitserve.policy import NEVER


@dataclass(frozen=True)
class Judged:
    """The sampled positions of a pass in which tokens may be final at the draft layer."""

    places: Tensor
    """[S] where they are in the pass."""
    limits: Tensor
    """[S, 3] what each must pass, see `Limits`."""
    is_final: Tensor
    """[S] bool, takes which tokens are final."""


class PassOutcome(NamedTuple):
    """What a pass gave one request."""

    request: Request
    drafts: int
    """How many were judged."""
    first: int
    """Index of the first generated token."""
    tokens: Sequence[int]
    """Generated; the last one was not drafted."""
    from_text: bool
    """Whether its drafts were of its own text."""
    is_final: Sequence[int]
    """Of each judged position, one more than `drafts`, whether it was final at the draft layer."""


Limits = tuple[float, float, float]
"""What a token must pass to be final: the threshold for any token, and that for an end of sequence;
and 1 if its request then needs the whole head's logits, else 0."""
IMPASSABLE: Limits = (NEVER, NEVER, 0.0)
"""Where full depth decides."""


class DraftingRequests(RunningRequests):
    """Counts and traces what passes give."""

    def __init__(self, state: EngineState) -> None:
        self._state, self._recorder = state, state.recorder
        (self.layer,) = state.rules.exit_layers
        """How many layers a draft runs."""
        self._by_number: dict[int, Request] = {}
        state.requests = self

    def read(self, params: Any, prompt_ids: Sequence[int] | None, name: str) -> Request:
        """The record of a request, from vLLM's `SamplingParams` and internal id."""
        state = self._state
        ends = state.eos_token_ids.tolist()
        return read_request(params, prompt_ids, state.rules, eos_ids=ends, name=name)

    def limits_of(self, request: Request) -> Limits:
        """What a token of a request must pass to be final at the draft layer."""
        if request.policy.mode != "defer":
            return IMPASSABLE
        return (*request.policy.thresholds_at(self.layer), float(request.needs_whole_head))

    def get(self, number: int, name: str) -> Request | None:
        """The request of a row or slot; None where it has another name, as in warm-ups."""
        request = self._by_number.get(number)
        return request if request is not None and request.name == name else None

    def count_pass(self) -> None:
        """Counts what a pass reads."""
        self._recorder.layer_reads += self._recorder.num_layers
        self._recorder.final_heads += 1

    def count(self, outcomes: Iterable[PassOutcome]) -> None:
        """Counts and traces a pass."""
        checks = passed = 0
        for one in outcomes:
            if not one.tokens:
                continue
            if one.request.policy.mode == "defer" and one.first > 0:
                checks += 1 + one.drafts
                passed += sum(one.is_final)
            self._recorder.count_judged(one.drafts, len(one.tokens) - 1, from_text=one.from_text)
            self._count_tokens(one)
        if checks:
            self._recorder.count_checks(self.layer, checks, passed)

    def _count_tokens(self, outcome: PassOutcome) -> None:
        request, full = outcome.request, self._recorder.num_layers
        pairs = zip(outcome.tokens, outcome.is_final, strict=False)
        source, last = "text" if outcome.from_text else "layers", len(outcome.tokens) - 1
        for number, (token, is_final) in enumerate(pairs, outcome.first):
            if 0 < request.max_tokens <= number:
                return  # the pass went on past the end
            depth = self.layer if is_final else full
            self._recorder.tokens_by_depth[depth] += 1
            self._recorder.deferred_layers += full - depth
            if request.trace_keys:
                own = source if number - outcome.first < last else ""
                self._recorder.trace(request.trace_keys, request.name, number, depth, own)
            if token in request.stop_ids:
                return


class RowRequests(DraftingRequests):
    """The requests of runner V1."""

    def __init__(self, runner: Any) -> None:
        model: Any = runner.get_model()
        super().__init__(model.exit_state)
        self._runner = runner
        self._rows: list[tuple[Request, int, int]] = []
        """Of the current pass: each row's request, its drafts, and the index of the token that its
        first sampled position leads to."""
        self._judged: Judged | None = None
        self._expected: dict[str, tuple[str, Sequence[float]]] = {}
        """By the names of requests that drafted: from which source, and the probability that each
        draft is accepted."""

    def begin(
        self,
        scheduled: Sequence[int],
        drafts: Mapping[str, Sequence[int]],
        places: Tensor,
        new: Collection[str],
    ) -> Judged | None:
        """Takes a pass; returns its sampled positions if a token may be final.

        Args:
            scheduled: [B] tokens of each row.
            drafts: by vLLM's internal id.
            places: [S] of the sampled positions in the pass.
            new: internal ids that begin, also those of sessions, which go on with other parameters.
        """
        batch = self._runner.input_batch
        computed = batch.num_computed_tokens_cpu[: batch.num_reqs].tolist()
        prompts = batch.num_prompt_tokens[: batch.num_reqs].tolist()
        self._rows = []
        for row, name in enumerate(batch.req_ids):
            count = len(drafts.get(name, ()))
            index = computed[row] + scheduled[row] - count - prompts[row]
            self._rows.append((self._in_row(row, name, new), count, index))
        self._judged = self._judge(places)
        return self._judged

    def _in_row(self, row: int, name: str, new: Collection[str]) -> Request:
        """The request that is in a row now."""
        request = self.get(row, name)
        if request is None or name in new:
            state = self._runner.requests[name]
            request = self.read(state.sampling_params, state.prompt_token_ids, name)
            self._by_number[row] = request
        return request

    def _judge(self, places: Tensor) -> Judged | None:
        if all(request.policy.mode != "defer" for request, _, _ in self._rows):
            return None
        limits: list[Limits] = []
        for request, drafts, index in self._rows:
            # The first generated token is full depth's, in every mode; a row drafts only after it.
            limits += [self.limits_of(request) if index > 0 else IMPASSABLE] * (1 + drafts)
        is_final = torch.zeros(len(limits), dtype=torch.bool)
        return Judged(places, torch.tensor(limits), is_final)

    def end(self, sampled: Sequence[Sequence[int]]) -> None:
        """Counts the pass, which gave each row [B] these tokens; none inside its prompt."""
        self.count_pass()
        is_final = [] if self._judged is None else self._judged.is_final.tolist()
        outcomes, start = [], 0
        for (request, drafts, index), tokens in zip(self._rows, sampled, strict=True):
            end = start + drafts + 1
            own = is_final[start:end] or [False] * (drafts + 1)
            source, expected = self._expected.get(request.name, ("layers", ()))
            if drafts and tokens:
                request.acceptance[source].accepted += len(tokens) - 1
                request.acceptance[source].expected += sum(expected[:drafts])
            outcomes.append(PassOutcome(request, drafts, index, tokens, source == "text", own))
            start = end
        self.count(outcomes)
        self._expected.clear()

    def expect(self, row: int, source: str, accepted: Sequence[float]) -> None:
        """Takes from where a row's drafts are that its next pass judges, and the probability that
        each is accepted."""
        self._expected[self._rows[row][0].name] = source, accepted

    def expected(self) -> tuple[int, float]:
        """Drafts that the next pass judges, so far, and how many of them it should accept."""
        found = [each for _, each in self._expected.values()]
        return sum(map(len, found)), sum(map(sum, found))

    def share(self, row: int, source: str) -> float:
        """`Acceptance.share` of a source of a row's drafts; 0 if it takes none from there."""
        request = self._rows[row][0]
        return request.acceptance[source].share if source in request.draft_sources else 0.0

    def may_draft(self, row: int, sampled: Sequence[int], most: int) -> int:
        """How many tokens a row may draft after a pass that gave it some."""
        request, _, index = self._rows[row]
        if not sampled or request.policy.mode == "off" or request.has_seed:
            return 0
        generated = index + len(sampled)
        known = request.prompt_length + generated
        left = [most, self._runner.max_model_len - known - 1]
        if request.max_tokens:
            left.append(request.max_tokens - generated - 1)
        return 0 if sampled[-1] in request.stop_ids else max(0, min(left))


@dataclass(frozen=True)
class Sampled:
    """The sampled positions of a pass, as runner V2 has them."""

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


class SlotRequests(DraftingRequests):
    """The requests of runner V2."""

    def __init__(self, state: EngineState, most_rows: int, device: torch.device) -> None:
        """Makes room.

        Args:
            state: the engine's.
            most_rows: requests that run together.
            device: where the model is.
        """
        super().__init__(state)
        self._limits = torch.tensor(IMPASSABLE, device=device).repeat(most_rows, 1)
        """`Limits` of each slot."""
        self._may_be_final: set[int] = set()
        """Slots whose requests have thresholds."""
        self.sources = torch.ones(most_rows, 2, dtype=torch.bool, device=device)
        """[slots, 2] whether each request takes drafts of its text, and of the first layers."""
        self.from_text = torch.zeros(most_rows, dtype=torch.bool, device=device)
        """[slots] whether the drafts that are judged next are of its text."""
        self._sampled: Sampled | None = None
        self._is_final: Tensor | None = None
        self._arrivals = Arrivals()

    def add(self, slot: int, request: Request) -> None:
        """Takes a request into a slot, a new one or one that was preempted."""
        self._by_number[slot] = request
        upload([one in request.draft_sources for one in ("text", "layers")], self.sources[slot])
        if request.policy.mode == "defer":
            self._may_be_final.add(slot)
            upload(self.limits_of(request), self._limits[slot])
        elif slot in self._may_be_final:  # by the request that was there before
            self._may_be_final.remove(slot)
            upload(IMPASSABLE, self._limits[slot])

    def begin(self, sampled: Sampled) -> Judged | None:
        """Takes the positions that a pass samples at; returns them if a token may be final."""
        self._arrivals.drain(wait=False)
        self._sampled, self._is_final = sampled, None
        if not self._may_be_final.intersection(sampled.slots):
            return None
        self._is_final = torch.zeros_like(sampled.slot_of, dtype=torch.bool)
        slots, places = sampled.slot_of.long(), sampled.places.long()
        lengths = sampled.prompt_lengths[slots]
        # The first generated token is full depth's, in every mode.
        begun = sampled.positions[places] >= lengths
        limits = torch.where(begun[:, None], self._limits[slots], NEVER)
        return Judged(places, limits, self._is_final)

    def end(self, num_sampled: Tensor) -> None:
        """Asks for the outcome of the pass that is under way.

        Args:
            num_sampled: [B] tokens that each row generated.
        """
        sampled, self._sampled = self._sampled, None
        if sampled is None:
            return
        self.count_pass()
        rows = [
            (self.get(slot, name), drafts)
            for slot, name, drafts in zip(sampled.slots, sampled.names, sampled.drafts, strict=True)
        ]
        self._arrivals.ask(self._found(sampled, num_sampled), partial(self._take, rows))

    def _found(self, sampled: Sampled, num_sampled: Tensor) -> Tensor:
        """[B, 3 + 2 (K + 1)]: the index of the first generated token, how many there are, whether
        drafts were of the text, then each one's id, and whether it is final."""
        starts = sampled.ends[:-1].long()
        slots = sampled.slot_of[starts].long()
        position = sampled.positions[sampled.places[starts].long()].long() + 1
        steps = torch.arange(1 + max(sampled.drafts, default=0), device=starts.device)
        ids = sampled.known_ids
        tokens = ids[slots[:, None], (position[:, None] + steps).clamp(max=ids.shape[1] - 1)]
        is_final = torch.zeros_like(tokens)
        if self._is_final is not None:
            places = (starts[:, None] + steps).clamp(max=len(self._is_final) - 1)
            is_final = self._is_final[places]
        index = position - sampled.prompt_lengths[slots]
        parts = (
            index[:, None],
            num_sampled[: len(slots), None],
            self.from_text[slots, None],
            tokens,
            is_final,
        )
        return torch.cat([part.long() for part in parts], dim=1)

    def _take(
        self, rows: Sequence[tuple[Request | None, int]], found: Sequence[Sequence[int]]
    ) -> None:
        """Counts a pass: each row's request, None in warm-ups, and how many drafts it had; what
        `_found` found."""
        outcomes = []
        for (request, drafts), (index, count, text, *pairs) in zip(rows, found, strict=True):
            tokens, is_final = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
            if request is not None:
                own = tokens[:count], bool(text), is_final[: 1 + drafts]
                outcomes.append(PassOutcome(request, drafts, index, *own))
        self.count(outcomes)

    def update_counts(self) -> None:
        """See `RunningRequests`; waits for the device."""
        self._arrivals.drain(wait=True)
