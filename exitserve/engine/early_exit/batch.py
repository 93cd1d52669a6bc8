"""One forward pass of runner V1: which rows may exit, which did, and with what logits.

Only the token that a row is about to generate from can exit: earlier tokens of a chunk are
prompt, or, after a preemption, tokens whose depth is known from the first time.

Shapes: B rows, T tokens, N rows to check, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from exitserve.engine.compat.context import BatchShape
from exitserve.engine.request import PreemptedRequests, Request, RunningRequests, read_request
from exitserve.engine.state import EngineState
from exitserve.policy import ExitRules


class Candidate(NamedTuple):
    """A row whose token of this pass may exit."""

    row: int
    request: Request


class Step:
    """One forward pass."""

    def __init__(
        self,
        row_ends: Sequence[int],
        last_positions: Sequence[int],
        rules: ExitRules,
        candidates: Sequence[Candidate],
        known_depth: Tensor | None = None,
    ) -> None:
        """Starts with what is known before the pass.

        Args:
            row_ends: [B] index after each row's last token.
            last_positions: [B] position of that token in its sequence.
            rules: the model's exit layers.
            candidates: rows that may exit.
            known_depth: [T] depths of recomputed tokens, full depth for all others; None where
                nothing is recomputed.
        """
        self.row_ends, self.last_positions = row_ends, last_positions
        self.lengths = [end - start for start, end in pairwise([0, *row_ends])]
        """[B] tokens of each row."""
        self.candidates, self.known_depth = candidates, known_depth
        self.depth: dict[int, int] = {}
        """Exit layers of the rows that exited."""
        self._exit_layers = rules.exit_layers
        self._kept_rows: list[int] = []
        self._kept_logits: list[Tensor] = []

    @property
    def is_plain(self) -> bool:
        """Whether every token runs all layers, and none is checked."""
        return self.known_depth is None and not any(self.due(one) for one in self._exit_layers)

    def due(self, layer: int) -> list[Candidate]:
        """The rows to check after `layer` layers."""
        if layer not in self._exit_layers:
            return []
        return [
            one
            for one in self.candidates
            if one.row not in self.depth and one.request.policy.thresholds_at(layer)[0] < math.inf
        ]

    def keep_logits(self, rows: Sequence[int], logits: Tensor) -> None:
        """Keeps the logits [N, V] of a check that `rows` [N] passed, for the sampler."""
        self._kept_rows += rows
        self._kept_logits.append(logits)

    @property
    def rows_without_logits(self) -> list[int]:
        """The rows that no check gave their logits, ascending."""
        kept = set(self._kept_rows)
        return [row for row in range(len(self.row_ends)) if row not in kept]

    def with_logits(self, fresh: Tensor | None) -> Tensor | None:
        """Logits [B, V] of all rows.

        Args:
            fresh: of `rows_without_logits`; None on ranks that get no logits, or without such rows.
        """
        rest = self.rows_without_logits
        if rest and fresh is None:
            return None
        parts = [*self._kept_logits, *([] if fresh is None else [fresh])]
        joined, order = parts[0] if len(parts) == 1 else torch.cat(parts), [*self._kept_rows, *rest]
        return joined if order == sorted(order) else joined[torch.tensor(order).argsort()]


class HostRequests(RunningRequests):
    """Runner V1's requests, by the row of its batch."""

    def __init__(self, state: EngineState) -> None:
        self._rules, self._recorder = state.rules, state.recorder
        self.rows: dict[int, Request] = {}
        self.preempted = PreemptedRequests()
        # Set by the worker once it is up (`exitserve.engine.hooks.worker_extension`).
        self.request_ids: Callable[[], list[str]] | None = None
        """vLLM's internal request ids, in row order."""
        self.keep_seeds: Callable[[], None] = lambda: None
        """Called once the batch of a pass is known."""
        state.requests = self

    def update(self, changes: BatchUpdate) -> None:
        """Follows vLLM: rows that are removed, then added, then moved."""
        for index in changes.removed:
            self._remove(index)
        # One that ended is not among the removed if another takes its row.
        running = len(self.rows.keys() | {index for index, *_ in changes.added})
        for index, params, prompt_ids, output_ids in changes.added:
            self._remove(index)
            self.rows[index] = read_request(
                params,
                prompt_ids,
                self._rules,
                output_ids=output_ids,
                # One that has begun is back, and has a record (`named`).
                running=0 if output_ids else running,
            )
        for source, target, direction in changes.moved:
            moved = self.rows.pop(source, None)
            if direction == MoveDirectionality.SWAP and target in self.rows:
                self.rows[source] = self.rows.pop(target)
            self._remove(target)
            if moved is not None:
                self.rows[target] = moved

    def _remove(self, index: int) -> None:
        """Empties a row, and keeps its request's record if it may come back."""
        request = self.rows.pop(index, None)
        if request is not None and request.name:
            self.preempted.keep(request)

    def named(self, index: int) -> Request:
        """The request in a row, its name known: with its earlier record if it was preempted.

        To be called during a pass: when vLLM adds a row, its request's name is not known yet.
        """
        request = self.rows[index]
        if request.name or self.request_ids is None:
            return request
        name = self.request_ids()[index]
        earlier = self.preempted.take(name)
        if earlier is not None:
            earlier.output_ids = request.output_ids
            request = self.rows[index] = earlier
        request.name = name
        return request

    def next_step(self, shape: BatchShape, positions: Tensor) -> Step:
        """The step of one forward pass over `positions` [T]."""
        ends: list[int] = shape.row_ends.tolist()
        last: list[int] = positions[shape.row_ends.long() - 1].tolist()
        candidates: list[Candidate] = []
        known: list[tuple[int, int]] = []
        recomputed = False
        start = 0
        for row, end in enumerate(ends):
            length, start = end - start, end
            request = self.rows.get(row)
            # Index of the generated token that the row's last position leads to.
            generated = 0 if request is None else last[row] + 1 - request.prompt_length
            if request is None or not request.asks or generated < 1:
                continue
            request = self.named(row)
            if request.policy.mode == "off":  # its exits are disabled
                continue
            before = _computed_before(request, generated, length, end)
            recomputed |= any(depth < self._rules.num_layers for _, depth in before)
            known += before
            if generated >= len(request.output_ids):
                candidates.append(Candidate(row, request))
                # Tokens before one that may exit: what a preempted request computed once.
                recomputed |= length > 1
        known_depth = None
        if recomputed:
            known_depth = torch.full((shape.num_tokens,), self._rules.num_layers)
            for token, depth in known:
                known_depth[token] = depth
        return Step(ends, last, self._rules, candidates, known_depth)

    def record(self, step: Step) -> None:
        """Counts and traces the tokens that a pass generates, one for each row that samples."""
        for row, position in enumerate(step.last_positions):
            request = self.rows.get(row)
            # A row samples only when its last known token has been computed; earlier prompt
            # chunks, and tokens recomputed after a preemption, do not generate.
            if request is None or position + 1 < request.length:
                continue
            depth, generated = step.depth.get(row, self._rules.num_layers), len(request.output_ids)
            self._recorder.tokens_by_depth[depth] += 1
            if request.policy.mode != "off":
                request.note_depth(generated, depth, self._rules.num_layers)
            if request.trace_keys:
                name = self.named(row).name
                self._recorder.trace(request.trace_keys, name, generated, depth)


def _computed_before(
    request: Request, generated: int, length: int, end: int
) -> list[tuple[int, int]]:
    """(token index, depth) of a chunk's tokens that were computed before a preemption; the chunk
    has `length` tokens before `end`, and leads to generated token `generated`."""
    depths = request.depths
    first = max(1, generated + 1 - length)
    past_last = min(generated + 1, len(request.output_ids), len(depths))
    return [(end - 1 - (generated - one), depths[one]) for one in range(first, past_last)]
