"""One step of the engine: who may exit in a forward pass, who did, and with what logits.

Only the token that a row is about to generate from can exit: earlier tokens of a chunk are
prompt, or, after a preemption, tokens whose depth is known from the first time.

Shapes: B rows, T tokens, S logits that the sampler wants, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from exitserve.engine.compat.sampling import Sampled
from exitserve.engine.pending_tokens import PendingTokens, Tokens
from exitserve.engine.requests import Exited, Request
from exitserve.policy import ALWAYS, ExitRules

KEPT = 1024
"""Rows of thresholds whose tensors are kept."""


@dataclass(frozen=True)
class Candidate:
    """A row whose token of this pass may exit."""

    row: int
    request: Request
    above: int = 0
    """The exit layer up to which it was checked while drafted."""

    def thresholds_at(self, layer: int) -> tuple[float, float]:
        """Thresholds after `layer` layers: for any token, and for an end of sequence."""
        return self.request.policy.thresholds_at(layer)

    def exits_unchecked(self, layer: int) -> bool:
        """Whether the row exits at `layer` whatever its confidence."""
        return self.thresholds_at(layer)[0] == ALWAYS

    def may_exit_at(self, layer: int) -> bool:
        """Whether its policy lets the token exit after `layer` layers, unless it was asked."""
        return layer > self.above and self.thresholds_at(layer)[0] < math.inf


@dataclass(eq=False)
class Draft:
    """A row that drafts, and what it found."""

    candidate: Candidate
    token: int
    """Its last token."""
    position: int
    """Where that is in its sequence."""
    most: int
    """Tokens that it may draft, at least one."""
    found: list[int] = field(default_factory=list)

    @property
    def row(self) -> int:
        """The batch row."""
        return self.candidate.row

    @property
    def stands(self) -> bool:
        """Whether nobody judges its drafts: they are the tokens (not in mode "verify")."""
        return self.candidate.request.policy.mode != "verify"

    def take(self, token: int, depth: int, sampled: Sampled | None = None) -> bool:
        """Takes what layer `depth` says of the next token; returns whether the row drafts on.

        In mode "verify" a token that ends the answer is not drafted, since nothing may follow it.
        In other modes nobody judges a draft: it is the token.
        """
        request = self.candidate.request
        ends = token in request.stop_ids
        if self.stands:
            request.decided.append(Exited(token, depth, sampled))
        elif ends:
            return False
        self.found.append(token)
        self.token, self.position = token, self.position + 1
        return not ends and len(self.found) < self.most


class Step:
    """One forward pass."""

    def __init__(
        self,
        row_ends: Sequence[int],
        last_positions: Sequence[int],
        rules: ExitRules,
        candidates: Sequence[Candidate] = (),
        known_depth: Tensor | None = None,
        pending: Mapping[int, PendingTokens] | None = None,
        drafts: Mapping[int, int] | None = None,
        decided: Mapping[int, Sequence[Exited]] | None = None,
        is_draft: bool = False,
        is_judged: bool = False,
    ) -> None:
        """Starts with what is known before the pass.

        Args:
            row_ends: [B] index after each row's last token.
            last_positions: [B] position of that token in its sequence.
            rules: the model's exit layers.
            candidates: rows that may exit.
            known_depth: [T] depths of recomputed tokens, full depth for all others; None where
                nothing is recomputed.
            pending: by row, tokens that wait at exit layers.
            drafts: by row, how many of its last tokens are drafts.
            decided: by row, the next tokens that are decided already: its drafts, and perhaps the
                one behind them.
            is_draft: the pass drafts.
            is_judged: it does so in mode "verify": its tokens are judged later.
        """
        self.is_draft, self.is_judged = is_draft, is_judged
        self.row_ends = row_ends
        self.lengths = [end - start for start, end in pairwise([0, *row_ends])]
        """[B] tokens of each row."""
        self.last_positions = last_positions
        self.known_depth = known_depth
        self.depth: dict[int, int] = {}
        """Exit layers of the rows that exited."""
        self.logits: list[tuple[list[int], Tensor]] = []
        """Logits of successful checks: rows [N], logits [N, V]. In a step that drafts, of all rows
        whose tokens are sampled."""
        self.guesses: dict[int, int] = {}
        """By row, the next token by the logits of its depth, if the pass drafts."""
        self._exit_layers = rules.exit_layers
        self.candidates = list(candidates)
        """The rows whose token may exit."""
        self.pending = dict(pending or {})
        counts = drafts or {}
        self._sample_ends = list(accumulate(1 + counts.get(r, 0) for r in range(len(row_ends))))
        """[B] after each row's last; the sampler wants logits of its last token and its drafts."""
        self._decided = dict(decided or {})
        self.decided = {
            self.samples(row).start + place: one
            for row, found in self._decided.items()
            for place, one in enumerate(found)
        }
        """By sample, the decided token that it is to be."""
        self.drafts_decided = any(counts.values()) and all(
            count <= len(self._decided.get(row, ())) for row, count in counts.items()
        )
        """Whether it has drafts, and exits decided all of them."""

    @property
    def is_plain(self) -> bool:
        """Whether the pass runs its own tokens through all layers, and checks none of them."""
        if self.known_depth is not None or any(self.pending.values()) or self.waiting_counts():
            return False
        return not any(
            one.may_exit_at(layer) for one in self.candidates for layer in self._exit_layers
        )

    def due(self, layer: int) -> list[Candidate]:
        """The rows to check after `layer` layers."""
        if layer not in self._exit_layers:
            return []
        return [
            one for one in self.candidates if one.row not in self.depth and one.may_exit_at(layer)
        ]

    def has_more(self, gone: Collection[int]) -> bool:
        """Whether tokens of rows that are not `gone` still wait."""
        return any(one for row, one in self.pending.items() if row not in gone)

    def only_pending(self) -> Step:
        """A pass over the tokens that wait, without those of this one."""
        nothing = [0] * len(self.row_ends)
        rules = ExitRules(num_layers=0, exit_layers=self._exit_layers)
        return Step(nothing, self.last_positions, rules, pending=self.pending)

    def waiting_counts(self) -> dict[int, int]:
        """By row, how many of the pass's own tokens have frozen, or wait at an exit layer."""
        counts = {row: one.count_from(self._first(row)) for row, one in self.pending.items()}
        return {row: count for row, count in counts.items() if count}

    def num_decided(self) -> dict[int, int]:
        """By row, how many of its first tokens in this pass are followed by decided ones."""
        return {
            row: self.lengths[row] - len(self.samples(row)) + len(found)
            for row, found in self._decided.items()
        }

    def restart_waiting(self) -> None:
        """Lets the pass's own tokens that were drafted run again, those that froze as far as they
        got."""
        for row in self.waiting_counts():
            self.pending[row].restart(self._first(row))

    def _first(self, row: int) -> int:
        return self.last_positions[row] - self.lengths[row] + 1

    def take_pending(self, layer: int, gone: Collection[int]) -> dict[int, Tokens]:
        """Tokens that wait at `layer` and go on with their rows, unless these are `gone`."""
        found = {row: one.take(layer) for row, one in self.pending.items() if row not in gone}
        return {row: tokens for row, tokens in found.items() if tokens is not None}

    def take_frozen(self, layer: int, gone: Collection[int]) -> list[Tokens]:
        """Tokens that froze at `layer` while drafted, of rows that are not `gone`."""
        found = [one.take_frozen(layer) for row, one in self.pending.items() if row not in gone]
        return [tokens for tokens in found if tokens is not None]

    @staticmethod
    def thresholds(checked: Sequence[Candidate], layer: int) -> tuple[Tensor, Tensor]:
        """[N] for any token, [N] for ends of sequence, of rows checked after `layer` layers."""
        return _columns(tuple(one.thresholds_at(layer) for one in checked))

    def keep_logits(self, rows: Sequence[int], logits: Tensor) -> None:
        """Keeps the logits [N, V] of a check that `rows` [N] passed, for the sampler."""
        self.logits.append((list(rows), logits))

    @property
    def found(self) -> bool:
        """Whether checks found anything: a row that exits, logits, or tokens before."""
        return bool(self.depth or self.logits or self.decided)

    @property
    def num_samples(self) -> int:
        """S: how many logits the sampler wants."""
        return self._sample_ends[-1]

    def samples(self, row: int) -> range:
        """Which of them are a row's."""
        return range(self._sample_ends[row - 1] if row else 0, self._sample_ends[row])

    def every_sample(self) -> Sequence[int]:
        """All of them, ascending."""
        return range(self.num_samples)

    def last_samples(self) -> Sequence[int]:
        """[B] each row's last."""
        return [end - 1 for end in self._sample_ends]

    def with_logits(self, wanted: Sequence[int]) -> list[int]:
        """Of the wanted ones, among which are each row's last, those that need no head: of checks,
        in the order in which they are kept, then decided ones."""
        kept = [self._sample_ends[row] - 1 for rows, _ in self.logits for row in rows]
        return [*kept, *(one for one in wanted if one in self.decided)]

    def without_logits(self, wanted: Sequence[int]) -> list[int]:
        """The other wanted ones."""
        kept = set(self.with_logits(wanted))
        return [one for one in wanted if one not in kept]


@lru_cache(KEPT)
def _columns(pairs: tuple[tuple[float, float], ...]) -> tuple[Tensor, Tensor]:
    """Thresholds [N, 2] as tensors [N], [N]; kept, as policies outlast many passes."""
    found = torch.tensor(pairs).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def draft_step(rows: Sequence[Draft], rules: ExitRules) -> Step:
    """A turn of one more token for each of `rows`, which are in ascending order."""
    by_row = {one.row: one for one in rows}
    waiting = {one.row: one.candidate.request.pending for one in rows}
    every = range(rows[-1].row + 1)
    return Step(
        list(accumulate(int(row in by_row) for row in every)),
        [by_row[row].position if row in by_row else 0 for row in every],
        rules,
        [one.candidate for one in rows],
        pending={row: one for row, one in waiting.items() if one is not None},
        is_draft=True,
        is_judged=not all(one.stands for one in rows),
    )


def merge_logits(
    step: Step, wanted: Sequence[int], fresh: Tensor | None, like: Tensor | None
) -> Tensor | None:
    """Logits of some samples [W, V], in their order.

    Args:
        step: holds those of the rows that exited, and the tokens that were decided before.
        wanted: [W] ascending, with each row's last one.
        fresh: the others', in their order; None on ranks that get no logits.
        like: [..., V] any logits; None on ranks that get none.
    """
    order = step.with_logits(wanted)
    parts = [logits for _, logits in step.logits]
    if decided := [step.decided[one] for one in order if one in step.decided]:
        if like is None:
            return None
        only = torch.full((len(decided), like.shape[-1]), -torch.inf, dtype=like.dtype)
        for logits, one in zip(only, decided, strict=True):
            if one.sampled is not None and one.sampled.logits is not None:
                logits.copy_(one.sampled.logits)
            else:
                logits[one.token] = 0.0
        parts.append(only)
    if len(order) < len(wanted):
        if fresh is None:
            return None
        order += step.without_logits(wanted)
        parts.append(fresh)
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    if order == list(wanted):
        return joined
    return joined[torch.tensor(order).argsort()]
