"""Requests of an engine that drafts: which tokens may be final without full depth, and the counts.

Both runners know their requests by a number: runner V1 by the row of its batch (`cpu`), runner V2
by a slot (`gpu`).

Shapes: S sampled positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from exitserve.engine.requests import Request, RunningRequests, read_request
from exitserve.engine.state import EngineState
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


class Outcome(NamedTuple):
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
        """Starts without requests; takes the engine's rules and what counts."""
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

    def count(self, outcomes: Iterable[Outcome]) -> None:
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

    def _count_tokens(self, outcome: Outcome) -> None:
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
