"""Predicts wall speedup where rows draft turn by turn, as far as they are sure, as on a CPU.

After a pass all B rows run their last token as far as its first exit that passes; those that exit
go on with the next token, as long as half of the batch takes part (`exitserve.engine.host.drafts`):

    turn(R)  = what it adds + sum over segments of n_i * layer(A_i) + check(A_i)
               A_i of the R rows get to segment i, and run it if they are B / 2 or more
    tokens   = 1 + (rows that exit, over all turns) / B
    pass     = rest(B) + exits(B) + regrouping + (L - e_1) * layers of what waits + head
    speedup  = tokens * full(B) / (turns + pass)

A token exits at layer e_i with probability q_i, independently of others. What waits for the pass
are all of the step's tokens, or, where tokens freeze, one of each row; those that froze are filled.

Pure Python. B rows, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from exitserve.step_costs.curves import StepCosts
from exitserve.step_costs.skipping import SCREEN, binomial

TURN_SECONDS = 0.35e-3, 0.06e-3
"""What a turn takes beside layers and checks (slots, contexts, small copies, recording), for one
row and for each further one, on a CPU: benchmarks/2026-11-26-exit-switch.md. One row takes about
half of that since; the rest makes up for starts and ends of answers, which are not counted."""
REGROUPING_SECONDS = 1e-3
"""What the pass of several rows takes more than its layers: their tokens join at different exits,
and attend several at a time (benchmarks/2026-11-26-steady-load.md)."""
SHARE = 0.5
"""Of a batch's rows, that a turn needs."""
GROUPS = 8
"""A larger batch is taken as so many groups of rows that do the same."""


@dataclass(frozen=True)
class _Turn:
    """One turn of some rows."""

    exits: tuple[float, ...]
    """Probabilities that 0, 1, ... of them exit."""
    seconds: float


def turns_speedup(
    costs: StepCosts, batch: int, shares: Mapping[int, float], drafts: int, *, freezes: bool
) -> float:
    """Wall speedup over full depth, one token a step.

    Args:
        costs: of the parts of a step.
        batch: B.
        shares: exit layer to the share of all tokens that exit there; at least one layer.
        drafts: most turns of a step.
        freezes: whether what exits is frozen (mode "confidence"), and runs no further.
    """
    groups = min(batch, GROUPS)
    turns = [_turn(costs, batch, rows, shares) for rows in range(groups + 1)]
    going, tokens, seconds = [0.0] * groups + [1.0], 1.0, 0.0
    for _ in range(drafts):
        after = [0.0] * (groups + 1)
        for rows, chance in enumerate(going):
            if chance and rows and rows >= SHARE * groups:
                seconds += chance * turns[rows].seconds
                for exited, share in enumerate(turns[rows].exits):
                    after[exited] += chance * share
                    tokens += chance * share * exited / groups
        going = after
    above = costs.num_layers - min(shares)
    waiting = batch if freezes else round(batch * tokens)
    seconds += costs.rest(batch) + costs.exits(batch) + costs.head(waiting)
    seconds += above * (costs.matrices(waiting) + costs.attention(batch))
    if batch > 1:
        seconds += REGROUPING_SECONDS
    if freezes:
        seconds += above * costs.fill(round(batch * (tokens - 1.0)))
    return tokens * costs.full(batch) / seconds


def _turn(costs: StepCosts, batch: int, rows: int, shares: Mapping[int, float]) -> _Turn:
    """A turn of some of the groups of a batch."""
    groups = min(batch, GROUPS)
    size = batch / groups
    exits = [0.0] * (rows + 1)
    first, more = TURN_SECONDS
    seconds = first + more * (round(rows * size) - 1)
    going, staying, start = {rows: 1.0}, 1.0, 0
    for layer in sorted(shares):
        passes = min(1.0, shares[layer] / staying) if staying > 0.0 else 0.0
        after = dict.fromkeys(range(rows + 1), 0.0)
        for active, chance in going.items():
            if active < SHARE * groups:
                exits[rows - active] += chance
                continue
            together = round(active * size)
            run = (layer - start) * costs.layer(together)
            seconds += chance * (run + _check(costs, together, passes))
            for exited, share in enumerate(binomial(active, passes)):
                after[active - exited] += chance * share
        going, staying, start = after, staying - shares[layer], layer
    for active, chance in going.items():
        exits[rows - active] += chance
    return _Turn(tuple(exits), seconds)


def _check(costs: StepCosts, rows: int, passes: float) -> float:
    """Mean seconds of a check, of the rows that a screen lets through where there is one."""
    if costs.precision is None:
        return costs.check(rows)
    opened = min(1.0, passes / costs.precision)
    any_opens = 1.0 - (1.0 - opened) ** rows
    return SCREEN * costs.check(rows) + any_opens * costs.check(max(1, round(rows * opened)))
