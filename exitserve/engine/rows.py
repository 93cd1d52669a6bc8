"""Per-request exit state by batch row, and the plan it gives for each forward pass.

`RowsProcessor` is a vLLM logits processor in name only: its hook runs before every forward pass
with the rows that came, went or moved, which is what the model needs to know.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from exitserve.engine.compat import BatchShape, cached_block, eos_token_ids
from exitserve.engine.options import rules_from
from exitserve.engine.pending import Bounds, Pending
from exitserve.engine.plan import Candidate, StepPlan
from exitserve.engine.recorder import Recorder
from exitserve.policy import ExitPolicy, ExitRules
from exitserve.schedule import CheckSchedule

MAX_PASTS = 4096
"""Requests remembered after they left the batch, should more than that be preempted."""


@dataclass
class Past:
    """What one request did so far; it outlives a preemption."""

    request_id: str
    schedule: CheckSchedule
    pending: Pending | None
    """None outside mode "defer"."""
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
    past: Past | None = None
    """None until the row's first pass, when its request's name is known."""


class Rows:
    """The exit state of one engine, shared by its logits processor and its model."""

    def __init__(self, rules: ExitRules, eos_ids: Tensor, bounds: Bounds = Bounds()) -> None:  # noqa: B008
        self.rules = rules
        self.bounds = bounds
        self.eos_token_ids = eos_ids
        self.recorder = Recorder(rules.num_layers, rules.exit_layers)
        self.request_ids: Callable[[], list[str]] | None = None
        """Names of the requests in row order, once the worker is attached."""
        self.is_alive: Callable[[str], bool] = lambda _: True
        """Whether a request that left the batch may come back."""
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
        return Row(
            policy=policy,
            prompt_length=len(prompt_ids or ()),
            output_ids=output_ids,
            trace_key=trace if isinstance(trace, str) else None,
        )

    def plan(self, shape: BatchShape, positions: Tensor) -> StepPlan:
        """The plan for one forward pass over `positions` [T]."""
        ends: list[int] = shape.row_ends.tolist()
        last: list[int] = positions[shape.row_ends.long() - 1].tolist()
        candidates: list[Candidate] = []
        known: list[tuple[int, int]] = []
        recomputed = False
        start = 0
        for index, end in enumerate(ends):
            length, start = end - start, end
            row = self._rows.get(index)
            if row is None or row.policy.mode == "off":
                continue
            # Index of the generated token that the row's last position leads to.
            generated = last[index] + 1 - row.prompt_length
            if generated < 1:
                continue
            past = self._past(index, row)
            if past.pending is not None:
                past.pending.expect(last[index] - length + 1)
            if generated == len(row.output_ids):
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
        return StepPlan(ends, last, self.rules, candidates, known_depth)

    def _past(self, index: int, row: Row) -> Past:
        if row.past is None:
            name = self._request_id(index)
            row.past = self._pasts.pop(name, None) or Past(
                name,
                self.rules.schedule_for(row.policy),
                Pending(self.bounds) if row.policy.mode == "defer" else None,
            )
        return row.past

    def _request_id(self, index: int) -> str:
        return self.request_ids()[index] if self.request_ids else ""

    def record(self, plan: StepPlan) -> None:
        """Counts and traces the tokens this pass generates, one for each row that is due."""
        for index, position in enumerate(plan.last_positions):
            row = self._rows.get(index)
            # A row samples only when its last known token has been computed; earlier prompt
            # chunks, and tokens recomputed after a preemption, do not generate.
            if row is None or position + 1 != row.prompt_length + len(row.output_ids):
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


_ENGINES: dict[str, Rows] = {}


def rows_of(vllm_config: Any) -> Rows:
    """The exit state of the engine that `vllm_config` describes, made at the first call.

    The processor and the model of one engine live in one process and get the same config.
    """
    key = vllm_config.instance_id
    if key not in _ENGINES:
        bounds = Bounds(block=cached_block(vllm_config))
        _ENGINES[key] = Rows(rules_from(vllm_config), eos_token_ids(vllm_config), bounds)
    return _ENGINES[key]


class RowsProcessor(LogitsProcessor):
    """Hands vLLM's batch changes to `Rows`; leaves logits as they are."""

    rules: ExitRules | None = None
    """Set in the front-end process once the model is known, so that every field is checked."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raises `ValueError` (HTTP 400) for bad `exit_*` fields."""
        rules = cls.rules
        if rules is not None:
            rules.policy_for(sampling_params.extra_args)

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows = rows_of(vllm_config)

    def is_argmax_invariant(self) -> bool:
        """True: logits stay as they are."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each forward pass, with what changed in the batch."""
        if batch_update is not None:
            self._rows.update(batch_update)
        self._rows.before_pass()

    def apply(self, logits: Tensor) -> Tensor:
        """Returns the logits [B, V] as they are."""
        return logits
