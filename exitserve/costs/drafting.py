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

Pure Python. B rows, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from exitserve.costs.byte_costs import serving_dtype, shape_of
from exitserve.costs.curves import StepCosts
from exitserve.costs.devices import cpu_costs, device_called
from exitserve.costs.sources import MOST_TOKENS, step_costs
from exitserve.errors import ExitServeError

MOST_DRAFTS = MOST_TOKENS - 1
MOST_ROWS = 1024
"""Of a batch, for which drafts are planned."""


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """A way to draft."""

    exit_layer: int
    """e."""
    drafts: int
    """k; 0 is plain decoding."""
    checks: bool = False
    """Whether tokens may stand without a judge (mode "defer")."""


def tokens_of(acceptance: float, drafts: int) -> float:
    """Mean tokens of a step whose drafts are each accepted with a probability."""
    return sum(acceptance**count for count in range(drafts + 1))


def step_seconds(costs: StepCosts, batch: int, way: Drafting) -> float:
    """Seconds of a step: its drafts, and the pass that judges them."""
    if way.drafts == 0:
        return costs.full(batch)
    judged = batch * (way.drafts + 1)
    first = way.exit_layer * costs.layer(batch)
    drafts = way.drafts * (first + costs.check(batch))
    layers = costs.num_layers * (costs.matrices(judged) + costs.attention(batch))
    heads = costs.head(judged) + (costs.check(judged) if way.checks else 0.0)
    return drafts + layers + heads + costs.rest(batch)


def drafting_speedup(costs: StepCosts, batch: int, way: Drafting, acceptance: float) -> float:
    """Wall speedup over full depth, one token a step."""
    tokens = tokens_of(acceptance, way.drafts)
    return tokens * costs.full(batch) / step_seconds(costs, batch, way)


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


def drafts_by_batch(
    costs: StepCosts, largest: int, way: Drafting, acceptance: float, most: int = MOST_DRAFTS
) -> list[tuple[int, int, int]]:
    """(first batch size, last, drafts) for all batches up to `largest`, in vLLM's form.

    vLLM takes it as `num_speculative_tokens_per_batch_size`.
    """
    found: list[tuple[int, int, int]] = []
    for batch in range(1, largest + 1):
        drafts = best_drafts(costs, batch, way, acceptance, most)
        if found and found[-1][2] == drafts:
            found[-1] = (found[-1][0], batch, drafts)
        else:
            found.append((batch, batch, drafts))
    return found


def drafts_here(
    config: Mapping[str, Any], way: Drafting, acceptance: float, gpu: str | None
) -> list[tuple[int, int, int]]:
    """`drafts_by_batch` for a checkpoint on a GPU or a CPU; where costs are not known, `way`'s.

    Args:
        config: the checkpoint's `config.json`.
        way: at most so many drafts.
        acceptance: of a draft.
        gpu: its driver's name of it; None for a CPU.
    """
    costs, device = None, None if gpu is None else device_called(gpu)
    with suppress(ExitServeError):  # of a shape that is not planned, as a mixture of experts
        if gpu is None:
            largest = MOST_ROWS * (way.drafts + 1)
            costs = cpu_costs(shape_of(config, serving_dtype(config, None)), largest)
        elif device is not None:
            options: Any = {"dtype": "bfloat16", "batch_sizes": (MOST_ROWS,)}
            costs = step_costs(config, device=device, **options).costs
    if costs is None:
        return [(1, MOST_ROWS, way.drafts)]
    return drafts_by_batch(costs, MOST_ROWS, way, acceptance, way.drafts)
