"""Per-request exit state by batch row, and the plan it gives for each forward pass.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from exitserve.check_schedule import CheckSchedule
from exitserve.engine.compat.config import cached_block, eos_token_ids
from exitserve.engine.compat.context import BatchShape
from exitserve.engine.device.requests import DeviceRequests, Known
from exitserve.engine.forced import Forced
from exitserve.engine.host.pending_tokens import Bounds, PendingTokens
from exitserve.engine.host.step_plan import Candidate, Draft, StepPlan
from exitserve.engine.options import options_of, rules_from
from exitserve.engine.recorder import Recorder
from exitserve.policy import ExitPolicy, ExitRules

MAX_PASTS = 4096
"""Requests remembered after they left the batch, should more than that be preempted."""


@dataclass
class Past:
    """What one request did so far; it outlives a preemption."""

    request_id: str
    schedule: CheckSchedule
    pending: PendingTokens | None
    """None in modes in which nothing waits."""
    drafts: list[int] = field(default_factory=list)
    """What vLLM was told to judge with the next pass."""
    depths: list[int] = field(default_factory=list)
    """Depth of each generated token, by its index."""

    def note(self, generated: int, depth: int, full_depth: int) -> None:
        """Keeps the depth of generated token number `generated`; earlier gaps ran at full depth."""
        self.depths += [full_depth] * (generated - len(self.depths))
        self.depths[generated:] = [depth]


@dataclass
class Row:
    """What the engine knows of the request in one batch row."""

    policy: ExitPolicy
    prompt_length: int
    output_ids: list[int]
    """vLLM's own list of generated tokens, read for its length only."""
    trace_key: str | None
    max_tokens: int
    prompt_hash: int
    """For `Forced`."""
    stops: frozenset[int]
    """Tokens after which none follows."""
    seeded: bool
    """Sampled with a seed of its own: the same answer each time."""
    past: Past | None = None
    """None until the row's first pass, when its request's name is known."""


class HostRows:
    """The exit state of one engine, shared by its logits processor and its model."""

    def __init__(
        self,
        rules: ExitRules,
        eos_ids: Tensor,
        bounds: Bounds = Bounds(),  # noqa: B008
        forced: Forced | None = None,
    ) -> None:
        self.rules = rules
        self.forced = forced
        self.number = 0
        """Of the current pass, or the last one."""
        self.only_decodes = False
        """Whether that had no other tokens than those it samples after."""
        self.bounds = bounds
        self.eos_token_ids = eos_ids
        self.recorder = Recorder(rules.num_layers, rules.exit_layers)
        self.request_ids: Callable[[], list[str]] | None = None
        """Names of the requests in row order, once the worker is attached."""
        self.is_alive: Callable[[str], bool] = lambda _: True
        """Whether a request that left the batch may come back."""
        self.resident: DeviceRequests | None = None
        """Where runner V2 leaves exits to the device."""
        self.before_pass: Callable[[], None] = lambda: None
        """Called once the rows of a pass are known."""
        self._rows: dict[int, Row] = {}
        self._pasts: OrderedDict[str, Past] = OrderedDict()
        """Of requests that left the batch and may come back, the longest gone first."""

    def update(self, batch: BatchUpdate) -> None:
        """Follows vLLM's persistent batch: removed, then added, then moved rows."""
        for index in batch.removed:
            self._leave(index)
        for index, params, prompt_ids, output_ids in batch.added:
            self._leave(index)
            self._rows[index] = self._row(params, prompt_ids, output_ids)
        for source, target, direction in batch.moved:
            moved = self._rows.pop(source, None)
            if direction == MoveDirectionality.SWAP and target in self._rows:
                self._rows[source] = self._rows.pop(target)
            self._leave(target)
            if moved is not None:
                self._rows[target] = moved

    def _leave(self, index: int) -> None:
        """Empties a row, and keeps what its request did if it may come back."""
        row = self._rows.pop(index, None)
        past = None if row is None else row.past
        if past is not None and past.request_id and self.is_alive(past.request_id):
            self._pasts[past.request_id] = past
            if len(self._pasts) > MAX_PASTS:
                self._pasts.popitem(last=False)

    def _row(self, params: Any, prompt_ids: list[int] | None, output_ids: list[int]) -> Row:
        fields = params.extra_args or {}
        policy = self.rules.policy_or_off(fields, structured=params.structured_outputs is not None)
        if prompt_ids is None:  # prompt given as embeddings: its length is not told
            policy = ExitPolicy.off()
        trace = fields.get("exit_trace")
        ends = [] if params.ignore_eos else self.eos_token_ids.tolist()
        return Row(
            policy=policy,
            prompt_length=len(prompt_ids or ()),
            output_ids=output_ids,
            trace_key=trace if isinstance(trace, str) else None,
            max_tokens=params.max_tokens or 0,
            prompt_hash=hash(tuple(prompt_ids or ())) if self.forced else 0,
            stops=frozenset([*ends, *(params.stop_token_ids or ())]),
            seeded=params.seed is not None and params.temperature > 0,
        )

    def plan(self, shape: BatchShape, positions: Tensor) -> StepPlan:
        """The plan for one forward pass over `positions` [T]."""
        ends: list[int] = shape.row_ends.tolist()
        last: list[int] = positions[shape.row_ends.long() - 1].tolist()
        self.number += 1
        candidates: list[Candidate] = []
        waiting: dict[int, PendingTokens] = {}
        drafts: dict[int, int] = {}
        known: list[tuple[int, int]] = []
        recomputed = False
        start = 0
        for index, end in enumerate(ends):
            length, start = end - start, end
            row = self._rows.get(index)
            if row is None:
                continue
            # Index of the generated token that the row's last position leads to.
            generated = last[index] + 1 - row.prompt_length
            drafts[index] = max(0, generated - len(row.output_ids))
            if row.policy.mode == "off" or generated < 1:
                continue
            past = self._past(index, row)
            # A grammar, the end of the context or a preemption may have taken drafts away.
            del past.drafts[drafts[index] :]
            if past.pending is not None:
                past.pending.expect(last[index] - length + 1, last[index], self.number)
                waiting[index] = past.pending
            if row.policy.mode != "verify" and generated == len(row.output_ids):
                candidates.append(Candidate(index, row.policy, past.schedule, past.pending))
                # Tokens before one that may exit: what a preempted request computed once.
                recomputed |= length > 1
            if past.pending is None:  # else nothing was frozen
                known += _computed_before(past.depths, row, generated, length, end)
        known_depth = None
        if recomputed or any(depth < self.rules.num_layers for _, depth in known):
            known_depth = torch.full((shape.num_tokens,), self.rules.num_layers)
            for token, depth in known:
                known_depth[token] = depth
        plan = StepPlan(ends, last, self.rules, candidates, known_depth, waiting, drafts)
        self.only_decodes = plan.num_samples == shape.num_tokens
        return plan

    def known(self) -> dict[int, Known]:
        """The requests of all rows, for an engine whose exits the device decides."""
        return {
            index: Known(
                self._request_id(index),
                row.policy,
                row.prompt_length,
                row.trace_key,
                prompt_hash=row.prompt_hash,
            )
            for index, row in self._rows.items()
        }

    def length(self, index: int) -> int:
        """Tokens of a row's request that are known."""
        row = self._rows[index]
        return row.prompt_length + len(row.output_ids)

    def _past(self, index: int, row: Row) -> Past:
        if row.past is None:
            name = self._request_id(index)
            row.past = self._pasts.pop(name, None) or Past(
                name,
                self.rules.schedule_for(row.policy),
                self._place_to_wait(row.policy),
            )
        return row.past

    def _place_to_wait(self, policy: ExitPolicy) -> PendingTokens | None:
        if policy.mode == "verify":  # bounded by the number of drafts, and judged in the next pass
            return PendingTokens(Bounds(most=self.rules.num_drafts + 1))
        return PendingTokens(self.bounds) if policy.mode == "defer" else None

    def _request_id(self, index: int) -> str:
        return self.request_ids()[index] if self.request_ids else ""

    def start_drafts(
        self, sampled: Sequence[Sequence[int]], most: int, *, seeded: bool
    ) -> list[Draft]:
        """The rows that may draft after a pass, in order.

        Args:
            sampled: [B] tokens that the pass generated.
            most: tokens that a row may draft.
            seeded: whether rows sampled with a seed draft too. Judging a draft takes random
                numbers of its own, so they must draft always or never to repeat an answer.
        """
        found = []
        for index, tokens in enumerate(sampled):
            row = self._rows.get(index)
            if row is None or row.policy.mode != "verify" or not tokens:
                continue
            if row.seeded and not seeded:
                continue
            past = self._past(index, row)
            left = row.max_tokens - len(row.output_ids) - 1
            if left < 1 or tokens[-1] in row.stops:
                continue
            assert past.pending is not None
            past.pending.clear()
            candidate = Candidate(index, row.policy, past.schedule, past.pending)
            position = row.prompt_length + len(row.output_ids) - 1
            most_here = min(left, most)
            found.append(
                Draft(candidate, tokens[-1], position, most_here, past.request_id, row.stops)
            )
        return found

    def keep_drafts(self, drafts: list[list[int]]) -> list[list[int]]:
        """Notes what each row drafted [B]."""
        for index, tokens in enumerate(drafts):
            row = self._rows.get(index)
            if row is not None and row.past is not None:
                row.past.drafts = list(tokens)  # vLLM changes its own
        return drafts

    def force_checks(
        self, checked: Sequence[Candidate], layer: int, plan: StepPlan
    ) -> list[bool] | None:
        """In benchmarks: which of the rows checked after `layer` layers pass."""
        if self.forced is None:
            return None
        return self.forced.passes(
            [(self._rows[c.row].prompt_hash, plan.last_positions[c.row], layer) for c in checked]
        )

    def force_acceptance(self, plan: StepPlan, logits: Tensor) -> None:
        """In benchmarks: changes the logits [S, V] so that as many drafts pass as were told."""
        if self.forced is None:
            return
        for index, row in self._rows.items():
            if row.past is not None and row.past.drafts and index < len(plan.row_ends):
                *judging, after = plan.samples(index)
                last = plan.last_positions[index]
                lots = [(row.prompt_hash, last - (after - one)) for one in judging]
                own = logits[after - len(judging) : after]
                self.forced.accept(own, row.past.drafts, lots)

    def judge(self, sampled: Sequence[Sequence[int]]) -> None:
        """Counts and traces what passes with drafts generated, for each row [B]."""
        for index, tokens in enumerate(sampled):
            row = self._rows.get(index)
            if row is None or row.past is None or not row.past.drafts or not tokens:
                continue
            self.recorder.drafted(len(tokens), len(row.past.drafts))
            row.past.drafts = []
            if row.trace_key is not None:
                first = len(row.output_ids) - len(tokens)
                for generated in range(first, len(row.output_ids)):
                    self.recorder.trace(
                        row.trace_key, self._request_id(index), generated, self.rules.num_layers
                    )

    def num_pending(self) -> int:
        """Tokens that wait at exit layers, of all requests."""
        pasts = [row.past for row in self._rows.values() if row.past is not None]
        waiting = (one.pending for one in (*pasts, *self._pasts.values()))
        return sum(len(pending) for pending in waiting if pending is not None)

    def record(self, plan: StepPlan) -> None:
        """Counts and traces the tokens this pass generates, one for each row that is due."""
        for index, position in enumerate(plan.last_positions):
            row = self._rows.get(index)
            # A row samples only when its last known token has been computed; earlier prompt
            # chunks, and tokens recomputed after a preemption, do not generate. Where there are
            # drafts of ours, `judge` counts. (vLLM also fills up passes with drafts of nothing.)
            if row is None or position + 1 < row.prompt_length + len(row.output_ids):
                continue
            if row.past is not None and row.past.drafts:
                continue
            depth = plan.depth.get(index, self.rules.num_layers)
            self.recorder.generated(depth)
            generated = len(row.output_ids)
            if row.past is not None:
                row.past.note(generated, depth, self.rules.num_layers)
            if row.trace_key is not None:
                request_id = self._request_id(index)
                self.recorder.trace(row.trace_key, request_id, generated, depth)


def _computed_before(
    depths: list[int], row: Row, generated: int, length: int, end: int
) -> list[tuple[int, int]]:
    """(token index, depth) of a chunk's tokens that were computed once before a preemption.

    Args:
        depths: of the row's generated tokens.
        row: the row.
        generated: index of the generated token that the chunk's last position leads to.
        length: of the chunk.
        end: index after the chunk's last token.
    """
    first = max(1, generated + 1 - length)
    past_last = min(generated + 1, len(row.output_ids), len(depths))
    return [(end - 1 - (generated - one), depths[one]) for one in range(first, past_last)]


_ENGINES: dict[str, HostRows] = {}


def rows_of(vllm_config: Any) -> HostRows:
    """The exit state of the engine that `vllm_config` describes, made at the first call.

    The processor and the model of one engine live in one process and get the same config.
    """
    key = vllm_config.instance_id
    if key not in _ENGINES:
        bounds = Bounds(block=cached_block(vllm_config))
        shares = options_of(vllm_config).get("forced")
        forced = None if shares is None else Forced(shares)
        _ENGINES[key] = HostRows(
            rules_from(vllm_config), eos_token_ids(vllm_config), bounds, forced
        )
    return _ENGINES[key]
