"""The requests of an engine whose exits the host decides: who may exit in a step, and who did.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from exitserve.engine.compat.context import BatchShape
from exitserve.engine.compat.sampling import BatchSampler, Sampled
from exitserve.engine.host.step import Candidate, Draft, Step
from exitserve.engine.pending_tokens import PendingTokens
from exitserve.engine.requests import Exited, Request
from exitserve.engine.state import EngineState


class HostRequests:
    """Runner V1's batch, as the loop on the host needs it."""

    def __init__(self, state: EngineState) -> None:
        """Takes the requests of an engine."""
        self.rules, self.recorder = state.rules, state.recorder
        self._state, self._batch = state, state.batch
        self.pass_number = 0
        """Of the current pass, or the last one."""
        self.only_decodes = False
        """Whether that had no other tokens than those it samples after."""
        self._step: Step | None = None
        """Of the current pass, if it was asked for."""
        self._exited: Mapping[int, int] = {}
        """By row, where tokens exited in that pass."""
        state.requests = self

    @property
    def rows(self) -> dict[int, Request]:
        """The requests by batch row."""
        return self._batch.rows

    @property
    def sampler(self) -> BatchSampler:
        """Of tokens behind a pass."""
        assert self._state.sampler is not None, "drafts come after the worker is up"
        return self._state.sampler

    def _may_draft(self, request: Request) -> bool:
        """Whether a request's next tokens may be drafted, in this batch.

        Where vLLM judges drafts of others, it would use up the numbers of a seed, and has no
        log-probabilities of drafts that were decided.
        """
        is_exact = request.has_seed or request.wants_logprobs
        return request.may_draft and not (is_exact and self._batch.verifies)

    def start_pass(self) -> None:
        """Numbers a new pass."""
        self.pass_number += 1
        self._exited, self._step = {}, None

    def decoding(self, shape: BatchShape, positions: Tensor) -> list[Request] | None:
        """The requests of a pass over `positions` [T], if each decodes one token and all are alike.

        Returns:
            Those by row; None if one has more tokens than that, new ones or such as wait, or if
            somebody asks for its depths: then a step has to tell.
        """
        count = len(shape.row_ends)
        if self._batch.is_traced or not shape.num_tokens == count == len(self.rows):
            return None
        found = []
        for row, last in enumerate(positions[:count].tolist()):
            request = self.rows.get(row)
            if request is None or request.length > last + 1:  # a prompt's chunk of one token
                return None
            if request.asks and not request.name:
                return None
            if request.policy.mode != "off" and not request.is_caught_up:
                return None
            found.append(request)
        return found

    def count_plain(self, count: int) -> None:
        """Counts a pass of so many rows that decoded at full depth, without a step."""
        self.only_decodes = True
        self.recorder.tokens_by_depth[self.rules.num_layers] += count

    def decoding_step(self, requests: Sequence[Request], positions: Tensor) -> Step:
        """The step of a pass over `positions` [B] that `decoding` told all about."""
        last: list[int] = positions[: len(requests)].tolist()
        begun = [
            (row, one)
            for row, one in enumerate(requests)
            if one.policy.mode != "off" and last[row] >= one.prompt_length
        ]
        self.only_decodes = True
        return Step(
            range(1, len(last) + 1),
            last,
            self.rules,
            [Candidate(row, one) for row, one in begun if one.policy.mode != "verify"],
            pending={row: one.pending for row, one in begun if one.pending is not None},
        )

    def next_step(self, shape: BatchShape, positions: Tensor) -> Step:
        """The step of one forward pass over `positions` [T]."""
        ends: list[int] = shape.row_ends.tolist()
        last: list[int] = positions[shape.row_ends.long() - 1].tolist()
        candidates: list[Candidate] = []
        waiting: dict[int, PendingTokens] = {}
        drafts: dict[int, int] = {}
        known: list[tuple[int, int]] = []
        decided: dict[int, list[Exited]] = {}
        recomputed = False
        start = 0
        for index, end in enumerate(ends):
            length, start = end - start, end
            request = self.rows.get(index)
            if request is None:
                continue
            # Index of the generated token that the row's last position leads to.
            generated = last[index] + 1 - request.prompt_length
            drafts[index] = max(0, generated - len(request.output_ids))
            if not request.asks or generated < 1:
                continue
            request = self._batch.named(index)
            if request.policy.mode == "off":  # its exits were off when it began
                continue
            # A grammar, the end of the context or a preemption may have taken drafts away.
            del request.drafts[drafts[index] :]
            first = last[index] - length + 1
            drafted = self._drafted_before(index, first, last[index], drafts[index])
            if request.pending is not None:
                waiting[index] = request.pending
            if request.freezes:
                before = _computed_before(request, generated, length, end)
                recomputed |= any(depth < self.rules.num_layers for _, depth in before)
                known += before + _frozen_before(request, end - length)
            if generated < len(request.output_ids):
                continue
            # One more than its drafts, if that one was taken away.
            decided[index] = request.decided[: drafts[index] + 1]
            self._rewind(index, request.decided[drafts[index] :])
            if drafted or not drafts[index]:
                own = self._candidates(index, drafts[index], ran=drafted == length)
                # Tokens before one that may exit: what a preempted request computed once.
                recomputed |= bool(own) and length > 1 and not drafted
                candidates += own
        known_depth = None
        if recomputed:
            known_depth = torch.full((shape.num_tokens,), self.rules.num_layers)
            for token, depth in known:
                known_depth[token] = depth
        step = Step(ends, last, self.rules, candidates, known_depth, waiting, drafts, decided)
        self._step = step
        self.only_decodes = step.num_samples == shape.num_tokens
        return step

    def _candidates(self, index: int, drafts: int, *, ran: bool) -> list[Candidate]:
        """The row, if its last token may exit in this pass.

        Args:
            index: the row.
            drafts: how many of its tokens in this pass are drafts.
            ran: whether the last one ran in part while drafted.
        """
        request = self.rows[index]
        if request.policy.mode == "verify" or len(request.decided) > drafts:
            return []
        if not ran or request.pending is None:
            return [Candidate(index, request)]
        above = request.pending.last_layer
        left = any(layer > above for layer in self.rules.exit_layers)
        return [Candidate(index, request, above)] if left else []

    def _rewind(self, index: int, dropped: Sequence[Exited]) -> None:
        """Takes a seed's random numbers back: vLLM samples anew what was decided first of these."""
        sampled = dropped[0].sampled if dropped else None
        if sampled is not None and sampled.seed_state is not None:
            self.sampler.rewind(index, sampled.seed_state)

    def _drafted_before(self, index: int, first: int, last: int, drafts: int) -> int:
        """How many tokens of a pass over positions `first` to `last` a row drafted after the last.

        Those of a request that was preempted since are computed anew; where they had frozen, what
        they decided is decided anew too.
        """
        request = self.rows[index]
        if request.pending is None:
            return 0
        request.pending.expect(first, last, self.pass_number, drafts)
        drafted = request.pending.count_from(first)
        if request.freezes and not drafted:
            self._rewind(index, request.decided)
            request.decided = []
        return drafted

    def decided_drafts(self) -> list[list[Sampled | None]] | None:
        """[B] the drafts of each row of the current pass; None where exits did not decide all.

        Those that are simply the likeliest are None.
        """
        step = self._step
        if step is None or not step.drafts_decided:
            return None
        return [
            [step.decided[sample].sampled for sample in step.samples(row)[:-1]]
            for row in range(len(step.row_ends))
        ]

    def samples_last(self, step: Step) -> bool:
        """Whether each row's last sample is all that the sampler needs logits of.

        The others are drafts that exits decided. Where a grammar needs the logits
        of a row, every row must have all of its own.
        """
        return step.drafts_decided and not any(one.has_grammar for one in self.rows.values())

    def record(self, step: Step) -> None:
        """Counts and traces the tokens that a pass generates, one for each row that samples."""
        self._exited = step.depth
        for index, position in enumerate(step.last_positions):
            request = self.rows.get(index)
            # A row samples only when its last known token has been computed; earlier prompt
            # chunks, and tokens recomputed after a preemption, do not generate. Where there are
            # drafts of ours, `record_verified` counts. (vLLM also fills up passes with empty
            # drafts.)
            if request is None or position + 1 < request.length:
                continue
            if request.drafts:
                continue
            depth = step.depth.get(index, self.rules.num_layers)
            if request.decided:
                depth = request.decided[0].depth
                request.pass_over()
            generated = len(request.output_ids)
            self._note_depth(index, generated, depth)

    def _note_depth(self, index: int, generated: int, depth: int) -> None:
        """Counts and traces a row's token, and keeps its depth for a preemption."""
        request = self.rows[index]
        self.recorder.count_token(depth)
        if request.policy.mode != "off":
            request.note_depth(generated, depth, self.rules.num_layers)
        self._trace(index, range(generated, generated + 1), depth)

    def _trace(self, index: int, generated: range, depth: int) -> None:
        """Keeps the depth of some generated tokens of a row, if its request asks for that."""
        if self.rows[index].trace_keys:
            request = self._batch.named(index)
            for token in generated:
                self.recorder.trace(request.trace_keys, request.name, token, depth)

    def start_drafts(self, sampled: Sequence[Sequence[int]], most: int) -> list[Draft]:
        """The rows that may draft after a pass, in order.

        None where all of them have just got their first token, and could go on to the most turns:
        that token is sent first. (Mode "verify" drafts as often as its oracle says.)

        Args:
            sampled: [B] tokens that the pass generated.
            most: tokens that a row may draft.
        """
        found, begun = [], False
        for index, tokens in enumerate(sampled):
            request = self.rows.get(index)
            if request is None or not self._may_draft(request) or not tokens:
                continue
            request = self._batch.named(index)
            begun |= len(request.output_ids) > 1 or request.policy.mode == "verify"
            left = request.max_tokens - len(request.output_ids) - 1
            if left < 1 or tokens[-1] in request.stop_ids:
                continue
            assert request.pending is not None
            if request.policy.mode != "defer":
                request.pending.clear()  # all were judged, or went through
            candidate = Candidate(index, request)
            found.append(Draft(candidate, tokens[-1], request.length - 1, min(left, most)))
        return found if begun else []

    def keep_drafts(self, drafts: Sequence[Sequence[int]]) -> None:
        """Notes what each row drafted [B]."""
        for index, tokens in enumerate(drafts):
            if (request := self.rows.get(index)) is not None:
                request.drafts = list(tokens)  # vLLM changes its own

    def record_verified(self, sampled: Sequence[Sequence[int]]) -> None:
        """Counts and traces the tokens [B] of a pass that judged drafts."""
        for index, tokens in enumerate(sampled):
            request = self.rows.get(index)
            if request is None or not request.drafts or not tokens:
                continue
            if request.policy.mode != "verify":
                self._record_decided(index, tokens)
                continue
            self.recorder.count_judged(len(request.drafts), len(tokens) - 1)
            self.recorder.tokens_by_depth[self.rules.num_layers] += len(tokens)
            count = len(request.output_ids)
            generated = range(count - len(tokens), count)
            self._trace(index, generated, self.rules.num_layers)
            request.drafts = []

    def _record_decided(self, index: int, tokens: Sequence[int]) -> None:
        """Counts and traces the tokens of a pass before which exits had decided the first ones."""
        request, full_depth = self._batch.named(index), self.rules.num_layers
        own = self._exited.get(index, full_depth)
        depths = [one.depth for one in request.decided]
        depths += [own] * (len(tokens) - len(depths))
        first = len(request.output_ids) - len(tokens)
        for generated, depth in enumerate(depths[: len(tokens)], first):
            self._note_depth(index, generated, depth)
        request.pass_over()

    def update_counts(self) -> None:
        """See `RunningRequests`."""
        self.recorder.pending_tokens = self._batch.num_pending()


def _frozen_before(request: Request, start: int) -> list[tuple[int, int]]:
    """(token index, depth) of a pass's tokens, from `start` on, that need nothing of it."""
    count = 0 if request.pending is None else request.pending.complete
    return [(start + place, one.depth) for place, one in enumerate(request.decided[:count])]


def _computed_before(
    request: Request, generated: int, length: int, end: int
) -> list[tuple[int, int]]:
    """(token index, depth) of a chunk's tokens that were computed once before a preemption.

    Args:
        request: the row's.
        generated: index of the generated token that the chunk's last position leads to.
        length: of the chunk.
        end: index after the chunk's last token.
    """
    depths = request.depths
    first = max(1, generated + 1 - length)
    past_last = min(generated + 1, len(request.output_ids), len(depths))
    return [(end - 1 - (generated - one), depths[one]) for one in range(first, past_last)]
