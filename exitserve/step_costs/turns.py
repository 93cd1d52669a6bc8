"""Predicts wall speedup where rows draft turn by turn, as on a CPU.

Where turns (`exitserve.engine.host.drafts`) go through all layers, B rows run a token a turn, to
its first exit that passes or to the end, and one more in the pass behind the turns:

    layers   = sum over segments of n_i * E[layer(A_i)] + E[check(A_i)], and E[head(A_last)]
               A_i of the B rows run segment i, with the tokens that waited for them
    turn     = what it adds + layers
    pass     = rest(B) + exits(B) + layers
    speedup  = (k + 1) * full(B) / (k * turn + pass)

Where they stop at the last exit, rows that exit go on as long as half of the batch does, and what
waits runs the other layers at once, or, where tokens freeze, one of each row:

    turn(R)  = what it adds + sum over segments of n_i * layer(A_i) + check(A_i)
               A_i of the R rows get to segment i, and run it if they are B / 2 or more
    tokens   = 1 + (rows that exit, over all turns) / B
    pass     = rest(B) + exits(B) + regrouping + (L - e_1) * layers of what waits + head
    speedup  = tokens * full(B) / (turns + pass)

Of several requests, one that has ended leaves its place empty until the others' step is over, and
who comes instead waits for the step that has begun by then:

    speedup / (1 + steps waited * tokens of a step / tokens of an answer)

A token exits at layer e_i with probability q_i, independently of others.

Pure Python. B rows, L layers, k drafts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from exitserve.policy import EXACT, Mode
from exitserve.step_costs.curves import StepCosts
from exitserve.step_costs.skipping import SCREEN, binomial

TURN_SECONDS = 0.45e-3, 0.1e-3
"""What a turn takes beside layers and checks (slots, contexts, small copies, recording), for one
row and for each further one, on a CPU: benchmarks/2026-11-26-turns.md. One row takes about half of
that; the rest makes up for what is not counted."""
REGROUPING_SECONDS = 1e-3
"""What the pass of several rows takes more than its layers where turns stopped: their tokens join
at different exits, and attend several at a time (benchmarks/2026-11-26-steady-load.md)."""
STEPS_WAITED = 1.2
"""By each request, at its end and its beginning (benchmarks/2026-11-26-turns.md)."""
SHARE = 0.5
"""Of a batch's rows, that a turn needs."""
MOST_ALONG = 16
"""Tokens of a row that wait at most (`exitserve.engine.pending_tokens.MAX_PENDING`)."""
GROUPS = 8
"""A larger batch is taken as so many groups of rows that do the same."""


@dataclass(frozen=True)
class _Turn:
    """One turn of some rows."""

    exits: tuple[float, ...]
    """Probabilities that 0, 1, ... of them exit."""
    seconds: float
    """Of layers, checks and head."""


def turns_speedup(
    costs: StepCosts,
    batch: int,
    shares: Mapping[int, float],
    drafts: int,
    mode: Mode,
    *,
    through: bool,
    answer: float = math.inf,
) -> float:
    """Wall speedup over full depth, one token a step.

    Args:
        costs: of the parts of a step.
        batch: B.
        shares: exit layer to the share of all tokens that exit there; at least one layer.
        drafts: k, most turns of a step.
        mode: "defer" or "confidence"; or "verify", whose turns stop at the last exit.
        through: whether turns go through all layers.
        answer: tokens that a request generates, on average.
    """
    if not through:
        found, tokens = _stopping(costs, batch, shares, drafts, mode not in EXACT)
    else:
        found, tokens = _through(costs, batch, shares, drafts, mode not in EXACT), drafts + 1.0
    return found if batch == 1 else found / (1.0 + STEPS_WAITED * tokens / answer)


def _through(
    costs: StepCosts, batch: int, shares: Mapping[int, float], drafts: int, freezes: bool
) -> float:
    """See `turns_speedup`."""
    layers = _turn(costs, batch, min(batch, GROUPS), shares, freezes, through=True).seconds
    if freezes:
        layers += _fills(costs, batch, shares, drafts)
    around = drafts * _around(batch) + costs.rest(batch) + costs.exits(batch)
    return (drafts + 1) * costs.full(batch) / ((drafts + 1) * layers + around)


def _stopping(
    costs: StepCosts, batch: int, shares: Mapping[int, float], drafts: int, freezes: bool
) -> tuple[float, float]:
    """See `turns_speedup`; with the tokens of a step."""
    groups = min(batch, GROUPS)
    turns = [
        _turn(costs, batch, rows, shares, freezes, through=False) for rows in range(groups + 1)
    ]
    going, tokens, seconds = [0.0] * groups + [1.0], 1.0, 0.0
    for _ in range(drafts):
        after = [0.0] * (groups + 1)
        for rows, chance in enumerate(going):
            if chance and rows and rows >= SHARE * groups:
                seconds += chance * (turns[rows].seconds + _around(round(rows * batch / groups)))
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
    return tokens * costs.full(batch) / seconds, tokens


def _around(rows: int) -> float:
    """Seconds of a turn beside layers and checks."""
    first, more = TURN_SECONDS
    return first + more * (rows - 1)


def _turn(
    costs: StepCosts,
    batch: int,
    rows: int,
    shares: Mapping[int, float],
    freezes: bool,
    *,
    through: bool,
) -> _Turn:
    """A turn of some of the groups of a batch, through all layers or to the last exit."""
    groups = min(batch, GROUPS)
    size, least = batch / groups, 1 if through else SHARE * groups
    exits = [0.0] * (rows + 1)
    seconds, going, staying, start = 0.0, {rows: 1.0}, 1.0, 0
    for layer in sorted(shares):
        passes = min(1.0, shares[layer] / staying) if staying > 0.0 else 0.0
        after = dict.fromkeys(range(rows + 1), 0.0)
        for active, chance in going.items():
            if active < least:
                exits[rows - active] += chance
                continue
            together = round(active * size)
            run = (layer - start) * _layer(costs, together, 1.0 if freezes else staying)
            seconds += chance * (run + _check(costs, together, passes))
            for exited, share in enumerate(binomial(active, passes)):
                after[active - exited] += chance * share
        going, staying, start = after, staying - shares[layer], layer
    for active, chance in going.items():
        exits[rows - active] += chance
        if through and active:
            together = round(active * size)
            run = (costs.num_layers - start) * _layer(costs, together, 1.0 if freezes else staying)
            seconds += chance * (run + costs.head(together))
    return _Turn(tuple(exits), seconds)


def _layer(costs: StepCosts, rows: int, staying: float) -> float:
    """Seconds of a layer that a share `staying` of all tokens gets to without an exit: the others
    come along."""
    tokens = round(rows / max(staying, 1.0 / MOST_ALONG))
    return costs.matrices(tokens) + costs.attention(rows)


def _fills(costs: StepCosts, batch: int, shares: Mapping[int, float], drafts: int) -> float:
    """Mean seconds a turn in which frozen tokens are filled."""
    seconds, staying = 0.0, 1.0
    for layer in sorted(shares):
        staying -= shares[layer]
        # When a row goes on, or at the end of a step.
        often = max(1.0 - (1.0 - max(0.0, staying)) ** batch, 1.0 / (drafts + 1))
        tokens = round(batch * shares[layer] / often)
        seconds += often * (costs.num_layers - layer) * costs.fill(tokens)
    return seconds


def _check(costs: StepCosts, rows: int, passes: float) -> float:
    """Mean seconds of a check, of the rows that a screen lets through where there is one."""
    if costs.precision is None:
        return costs.check(rows)
    opened = min(1.0, passes / costs.precision)
    any_opens = 1.0 - (1.0 - opened) ** rows
    return SCREEN * costs.check(rows) + any_opens * costs.check(max(1, round(rows * opened)))
