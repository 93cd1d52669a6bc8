"""Predicts wall speedup of several tokens a step.

The first e layers draft k tokens one after the other, then all layers judge them and the token
before them in one pass. Each draft is accepted with probability a, independently of the others:

    tokens(a, k) = 1 + a + ... + a^k                                 of a step, on average
    step(B)      = k * (e * layer(B) + check(B)) + full(B * (k + 1)) + checks
    speedup      = tokens * full(B) / step(B)

`full` of more rows costs what it costs of B as long as reading weights takes the time, except that
attention reads a request's keys and values once for all its tokens. A draft reads the rows of the
head that a check reads. In mode "defer" one check more decides which tokens stand without a judge,
and "accepted" means that a draft stands or full depth agrees.

Drafts of a request's own text come first. They cost nothing but their rows in the pass that judges
them, and a share of the steps has any: those whose last tokens occurred before.

Pure Python. B rows, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any

from exitserve.costs.byte_costs import serving_dtype, shape_of
from exitserve.costs.curves import StepCosts
from exitserve.costs.devices import cpu_costs, device_called, row_share_here
from exitserve.costs.sources import MOST_TOKENS, step_costs
from exitserve.errors import ExitServeError

MOST_DRAFTS = MOST_TOKENS - 1
MOST_ROWS = 1024
"""Of a batch, for which drafts are planned."""
TEXT_SHARE = 0.25
"""Of the steps, those that draft from the text."""
TEXT_ACCEPTED = (0.6, 0.4, 0.25, 0.2)
"""In such a step, the probability that so many drafts are accepted: one, two, and so on. Both were
counted on code and on chats, of one tokenizer each."""
BY_MATCH = {
    2: (0.48, 0.27, 0.18, 0.12, 0.09, 0.06, 0.05, 0.04),
    3: (0.55, 0.36, 0.25, 0.18, 0.14, 0.10, 0.08, 0.07),
    4: (0.65, 0.45, 0.32, 0.25, 0.20, 0.16, 0.13, 0.11),
    6: (0.72, 0.55, 0.43, 0.34, 0.28, 0.24, 0.20, 0.17),
    8: (0.80, 0.64, 0.53, 0.44, 0.38, 0.33, 0.30, 0.26),
    12: (0.84, 0.73, 0.64, 0.57, 0.51, 0.46, 0.40, 0.36),
    16: (0.89, 0.79, 0.70, 0.63, 0.57, 0.52, 0.48, 0.45),
    24: (0.94, 0.89, 0.84, 0.79, 0.75, 0.71, 0.68, 0.65),
}
"""The same by how many of the last tokens had occurred before, at least so many."""
LONGEST_MATCH = max(BY_MATCH)
ACCEPTED_AT = (0.0, 0.2, 0.4, 0.67, 1.0), (0.0, 0.49, 0.55, 0.78, 1.0)
"""Shares of the depth, and of the drafts there that are accepted, joined by straight lines: what
SmolLM2-135M reached, trained on 29M tokens."""
PRIOR, SAMPLED = 2.0, 1.0
"""Accepted drafts with which each request begins: as expected, and half of it if it samples, whose
tokens are the most likely ones less often; judging them takes longer, too."""


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """A way to draft."""

    exit_layer: int
    """e."""
    drafts: int
    """k of the first layers; 0 is none."""
    text: int = 0
    """Of the text, in steps that have any."""
    checks: bool = False
    """Whether tokens may stand without a judge (mode "defer")."""
    alike: bool = False
    """Whether all rows take as many places in the pass as those with most drafts, as on GPUs."""


NO_DRAFTS = Drafting(exit_layer=0, drafts=0)


def assumed_acceptance(layer: int, num_layers: int) -> float:
    """Of a draft of the first layers of a model for which it was not counted."""
    from numpy import interp

    return float(interp(layer / num_layers, *ACCEPTED_AT))


def tokens_of(acceptance: float, way: Drafting) -> float:
    """Mean tokens of a step, each draft of the layers being accepted with a probability."""
    layers = sum(acceptance**count for count in range(1, way.drafts + 1))
    share = TEXT_SHARE if way.text else 0.0
    return 1 + share * sum(TEXT_ACCEPTED[: way.text]) + (1 - share) * layers


def step_seconds(costs: StepCosts, batch: int, way: Drafting) -> float:
    """Seconds of a step: its drafts, and the pass that judges them."""
    if way.drafts == way.text == 0:
        return costs.full(batch)
    share = TEXT_SHARE if way.text else 0.0
    mean = share * way.text + (1 - share) * way.drafts
    judged = batch * (1 + (max(way.text, way.drafts) if way.alike else mean))
    first = way.exit_layer * costs.layer(batch) + costs.check(batch)
    # The first layers run where any row has no drafts of its text.
    drafts = (1 - share**batch) * way.drafts * first
    return drafts + judge_seconds(costs, batch, judged, way)


def judge_seconds(costs: StepCosts, batch: int, judged: float, way: Drafting) -> float:
    """Seconds of a pass that judges so many tokens of a batch, drafts among them."""
    layers = costs.num_layers * (costs.matrices(judged) + costs.attention(batch))
    heads = costs.head(judged) + (costs.check(judged) if way.checks else 0.0)
    return layers + heads + costs.rest(judged)


def drafting_speedup(costs: StepCosts, batch: int, way: Drafting, acceptance: float) -> float:
    """Wall speedup over full depth, one token a step."""
    return tokens_of(acceptance, way) * costs.full(batch) / step_seconds(costs, batch, way)


def best_drafts(
    costs: StepCosts, batch: int, way: Drafting, acceptance: float, most: int = MOST_DRAFTS
) -> int:
    """The number of drafts with the greatest wall speedup; 0 where drafts cost more than they give.

    Args:
        costs: of the parts of a step.
        batch: B.
        way: all but its number of drafts counts.
        acceptance: of a draft.
        most: at most so many.
    """

    def gain(drafts: int) -> float:
        return drafting_speedup(costs, batch, replace(way, drafts=drafts), acceptance)

    return max(range(most + 1), key=gain)


def best_text_drafts(costs: StepCosts, batch: int, way: Drafting, most: int = MOST_DRAFTS) -> int:
    """The same for drafts of the text alone, at the acceptance that was measured."""

    def gain(drafts: int) -> float:
        return drafting_speedup(costs, batch, replace(way, drafts=0, text=drafts), 0.0)

    return max(range(min(most, len(TEXT_ACCEPTED)) + 1), key=gain)


def accepted_of(match: int) -> Sequence[float]:
    """The probabilities that drafts of a match of so many tokens are accepted."""
    return BY_MATCH.get(max((one for one in BY_MATCH if one <= match), default=0), ())


def text_drafts(least: float, most: int) -> list[int]:
    """[LONGEST_MATCH + 1] how many tokens of the text are drafted, by the length of the match.

    Args:
        least: the probability of being accepted, above which a draft pays.
        most: at most so many.
    """
    return [
        min(most, sum(one > least for one in accepted_of(length)))
        for length in range(LONGEST_MATCH + 1)
    ]


def price(costs: StepCosts, batch: int) -> float:
    """What a further row of a pass costs, as a share of what a token costs at full depth."""
    none, one = (judge_seconds(costs, batch, batch + more, NO_DRAFTS) for more in (0, 1))
    return (one - none) * batch / costs.full(batch)


@dataclass
class Acceptance:
    """Of one source of a request: how many drafts were accepted, and how many should have been."""

    accepted: float = PRIOR
    expected: float = PRIOR

    @property
    def share(self) -> float:
        """Of the accepted drafts that were expected; below 1 fewer drafts pay."""
        return self.accepted / self.expected


@dataclass(frozen=True, eq=False)
class Drafts:
    """How many tokens are drafted at a time: as many as pay in a batch of so many requests, where
    this share of the accepted drafts that are expected comes true (`Acceptance`)."""

    way: Drafting
    """At most so many."""
    acceptance: float
    """Of a draft of the first layers."""
    costs: StepCosts | None = None
    """None: always `way`'s."""

    def of_text(self, batch: int, share: float = 1.0) -> Sequence[int]:
        """[LONGEST_MATCH + 1] of a request's own text, by the length of the match."""
        return _of_text(self, min(batch, MOST_ROWS), round(8 * share))

    def of_layers(self, batch: int, share: float = 1.0) -> int:
        """Of the first layers, if all requests draft."""
        return _of_layers(self, min(batch, MOST_ROWS), round(8 * share))

    def of_some(
        self, batch: int, shares: Sequence[float], drafted: int = 0, accepted: float = 0.0
    ) -> int:
        """Of the first layers, if only some requests draft, which read their weights for few rows.

        Args:
            batch: B.
            shares: of those that draft.
            drafted: tokens of the others' text.
            accepted: those of them that are expected to be accepted.
        """
        costs, rows = self.costs, len(shares)
        if costs is None or not rows:
            return self.way.drafts if rows else 0
        first = self.way.exit_layer * costs.layer(rows) + costs.check(rows)
        accept = [min(1.0, self.acceptance * share) for share in shares]

        def tokens_a_second(drafts: int) -> float:
            more = sum(one**count for one in accept for count in range(1, drafts + 1))
            judged = batch + drafted + rows * drafts
            seconds = drafts * first + judge_seconds(costs, batch, judged, self.way)
            return (batch + accepted + more) / seconds

        return max(range(self.way.drafts + 1), key=tokens_a_second)

    def by_batch(self) -> list[tuple[int, int, int]]:
        """(first batch size, last, drafts), the most of either source.

        vLLM takes it as `num_speculative_tokens_per_batch_size`.
        """

        def most(batch: int) -> int:
            return max(*self.of_text(batch), self.of_layers(batch))

        spans = [(drafts, list(found)) for drafts, found in groupby(range(1, MOST_ROWS + 1), most)]
        return [(batches[0], batches[-1], drafts) for drafts, batches in spans]


@cache
def _of_text(drafts: Drafts, batch: int, eighths: int) -> Sequence[int]:
    costs, way = drafts.costs, drafts.way
    if costs is None:
        return always(way.drafts)
    if way.alike:  # passes have one number of drafts
        return always(best_text_drafts(costs, batch, way, way.drafts))
    return text_drafts(8 * price(costs, batch) / max(eighths, 0.5), way.drafts)


@cache
def _of_layers(drafts: Drafts, batch: int, eighths: int) -> int:
    costs, way = drafts.costs, drafts.way
    if costs is None:
        return way.drafts
    acceptance = min(1.0, drafts.acceptance * eighths / 8)
    return best_drafts(costs, batch, way, acceptance, way.drafts)


def always(count: int) -> list[int]:
    """As `text_drafts`: so many of any match."""
    return [count if length >= min(BY_MATCH) else 0 for length in range(LONGEST_MATCH + 1)]


def drafts_here(
    config: Mapping[str, Any], way: Drafting, acceptance: float, gpu: str | None
) -> Drafts:
    """What pays for a checkpoint on a GPU or a CPU; where costs are not known, `way`'s drafts.

    Args:
        config: the checkpoint's `config.json`.
        way: at most so many drafts.
        acceptance: of a draft of the first layers.
        gpu: its driver's name of it; None for a CPU.
    """
    costs, device = None, None if gpu is None else device_called(gpu)
    with suppress(ExitServeError):  # of a shape that is not planned, as a mixture of experts
        if gpu is None:
            largest = MOST_ROWS * (way.drafts + 1)
            shape = shape_of(config, serving_dtype(config, None))
            costs = cpu_costs(shape, largest, row_share_here())
        elif device is not None:
            options: Any = {"dtype": "bfloat16", "batch_sizes": (MOST_ROWS,)}
            costs = step_costs(config, device=device, **options).costs
    return Drafts(replace(way, alike=gpu is not None), acceptance, costs)
