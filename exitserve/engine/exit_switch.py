"""Which exit layers are on: those that pay with the requests that a server has.

Exits cost more than they save where checks are dear or seldom pass, or where many requests decode
together, since a layer's weights are read as long as one of them needs them. Then they are off: a
request that begins runs at full depth, in passes that are vLLM's own, or has the first exit layers
only. It keeps the exits with which it began, so that what it gets does not depend on who joins it.

What is decided on is counted, not timed: how many requests decode together, and at which depths
the tokens of a policy stop. With what the parts of a step cost on this machine, timed at start
(`exitserve.engine.host.own_costs`), the wall speedup follows as in `exitserve plan`
(`exitserve.step_costs.skipping`); of requests that draft, as in `exitserve.step_costs.turns`.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

from exitserve.engine.recorder import Recorder
from exitserve.policy import DECIDED, EXACT, NEVER, ExitPolicy, ExitRules, Mode
from exitserve.step_costs.curves import PRECISION, StepCosts
from exitserve.step_costs.skipping import speedup
from exitserve.step_costs.turns import turns_speedup

logger = logging.getLogger(__name__)

ALONE, TOGETHER = 1.05, 1.2
"""Expected wall speedup from which exits go on, for requests that decode alone and for several.
Of several, less comes true, 0.86 to 1.02 of it under load (benchmarks/2026-11-26-turns.md), and
still less among requests that have no exits (benchmarks/2026-11-26-steady-load.md)."""
HOLD = 0.02
"""By so much less it has to be for them to go off."""
ENOUGH = 96
"""Tokens from which a policy can be judged; until then its exits are on."""
MEMORY = 2048
"""Tokens that count: beyond it, older ones count half."""
STEPS = 50
"""In which shares are counted: finer differences do not matter, and need no new computation."""
PASSES = 64
"""Passes between two judgements of a policy; one of several tokens a request counts as several."""
SMOOTH = 1 / 32
"""Weight of the last pass in the mean number of requests that decode together."""
RETRY = 256
"""Requests that begin with exits off until their policy is tried anew, since texts change."""
KINDS = 64
"""Kinds of requests that are remembered, those that were seen last."""
REQUESTS = 256
"""Requests by which the length of answers is known: beyond it, older ones count half."""
SHORTEST, LONGEST = 16, 1024
"""Lengths of answers in tokens, between which they matter, in steps of the former."""
MOST_ROWS = 64
"""Requests together, from which costs no longer change the verdict."""


@dataclass
class Evidence:
    """What was counted of requests of one policy that had all of its exits."""

    depths: Counter[int] = field(default_factory=Counter)
    """Tokens by the depth at which they stopped."""
    goes_through: bool = True
    """Whether turns of drafts had better go through all layers (`exitserve.step_costs.turns`)."""

    def note_token(self, depth: int) -> None:
        """Notes a token that stopped at a depth."""
        self.depths[depth] += 1
        if self.depths.total() > MEMORY:
            for one in self.depths:
                self.depths[one] //= 2

    def shares(self, layers: tuple[int, ...]) -> dict[int, float]:
        """Share of all tokens that stop at each of these layers, rounded down to 1 / `STEPS`."""
        total = self.depths.total()
        return {one: self.depths[one] * STEPS // total / STEPS for one in layers}


@dataclass
class _Kind:
    """The requests of one policy that draft, or do not, and sample, or do not: text that is sampled
    exits at other depths."""

    policy: ExitPolicy
    layers: tuple[int, ...]
    """Where they may exit; none where their thresholds are of layers that are not served."""
    drafts: bool
    samples: bool
    on: tuple[int, ...]
    """Of these layers: where requests that begin now may exit."""
    expected: float | None = None
    """Wall speedup with these; None where it is not computed."""
    evidence: Evidence = field(default_factory=Evidence)
    judged: int = 0
    """The pass of the last judgement."""
    rows: int = 0
    """The requests at a time for which it was made."""
    left_out: int = 0
    """Requests that began with fewer exits since all were on."""


class ExitSwitch:
    """Turns the exit layers of one engine on and off."""

    def __init__(self, rules: ExitRules, recorder: Recorder) -> None:
        """All exits are on until `costs` are known.

        Args:
            rules: the engine's.
            recorder: counts the requests that begin without an exit layer.
        """
        self._rules, self._recorder = rules, recorder
        self.costs: StepCosts | None = None
        """What the parts of a step cost here; the same on all ranks."""
        self._rows = 1.0
        """That decode together, the mean of the last passes."""
        self._passes = 0
        self._begun, self._tokens = 0, 0
        """Requests, and tokens of passes that did nothing but decode."""
        self._kinds: OrderedDict[tuple[ExitPolicy, bool, bool], _Kind] = OrderedDict()

    def begin(
        self, policy: ExitPolicy, *, drafts: bool, samples: bool = False, running: int = 1
    ) -> tuple[ExitPolicy, Evidence | None]:
        """The policy that a request gets which begins now.

        Args:
            policy: what it asks for.
            drafts: whether its tokens may be drafted.
            samples: whether they are drawn, rather than the likeliest.
            running: requests that will be in its batch, itself included.

        Returns:
            The policy with the exits that are on, and what counts its tokens; None if some are off.
        """
        self._begun += 1
        if self._begun > REQUESTS:
            self._begun, self._tokens = self._begun // 2, self._tokens // 2
        # In mode "verify" nothing is lost by exits, and at a fixed layer nothing is checked.
        if self.costs is None or policy.mode not in DECIDED:
            return policy, None
        kind = self._kind(policy, drafts, samples)
        rows = min(max(round(self._rows), running), MOST_ROWS)
        is_old = self._passes - kind.judged >= PASSES
        if kind.layers and (is_old or rows > kind.rows):
            self._judge(kind, rows)
        if kind.on == kind.layers:
            return policy, kind.evidence
        kind.left_out += 1
        if kind.left_out >= RETRY:
            kind.evidence, kind.left_out = Evidence(), 0
        for layer in kind.layers[len(kind.on) :]:
            self._recorder.without_exit[layer] += 1
        return policy.up_to(kind.on), None

    def note_pass(self, rows: int, tokens: int = 1) -> None:
        """Notes a pass in which so many requests decoded, each so many tokens."""
        self._passes += tokens
        self._tokens += rows * tokens
        self._rows += (1.0 - (1.0 - SMOOTH) ** tokens) * (rows - self._rows)

    def table(self) -> list[dict[str, Any]]:
        """What is on for each policy, for people; nothing where all always are."""
        if not self._rules.switches_exits:
            return []
        return [
            {
                "mode": kind.policy.mode,
                "thresholds": {layer: kind.policy.thresholds_at(layer)[0] for layer in kind.layers},
                "drafts": kind.drafts,
                "samples": kind.samples,
                "on": list(kind.on),
                "expected_wall_speedup": kind.expected,
            }
            for kind in self._kinds.values()
        ]

    def _kind(self, policy: ExitPolicy, drafts: bool, samples: bool) -> _Kind:
        key = policy, drafts, samples
        if key not in self._kinds:
            layers = self._rules.exit_layers
            own = tuple(one for one in layers if policy.thresholds_at(one)[0] < NEVER)
            self._kinds[key] = _Kind(policy, own, drafts, samples, own, judged=self._passes)
            if len(self._kinds) > KINDS:
                self._kinds.popitem(last=False)
        self._kinds.move_to_end(key)
        return self._kinds[key]

    def _judge(self, kind: _Kind, rows: int) -> None:
        kind.judged, kind.rows = self._passes, rows
        before = kind.on
        if kind.evidence.depths.total() < ENOUGH:
            kind.on, kind.expected = kind.layers, None
        else:
            kind.on, kind.expected = self._best(kind, rows, self._answer(rows))
            if not self._rules.switches_exits:
                kind.on = kind.layers
        if kind.on == kind.layers:
            kind.left_out = 0
        if kind.on != before:
            _tell(kind, rows)

    def _answer(self, running: int) -> int:
        """Tokens that a request generates, on average and roughly; many until one has ended."""
        ended = self._begun - running
        mean = self._tokens / ended if ended > 0 else LONGEST
        return round(min(max(mean, SHORTEST), LONGEST) / SHORTEST) * SHORTEST

    def _best(self, kind: _Kind, rows: int, answer: int) -> tuple[tuple[int, ...], float]:
        """The exits that pay most with so many requests of a length, and the wall speedup expected
        of them.

        Also tells the requests whether their turns go through all layers.
        """
        assert self.costs is not None
        screens = self._rules.screens_file is not None
        costs = replace(self.costs, precision=PRECISION if screens else None)
        shares = kind.evidence.shares(kind.layers)
        drafts = self._rules.num_drafts if kind.drafts else 0
        ways = {
            some: _expected(
                costs,
                rows,
                tuple((one, shares[one]) for one in some),
                drafts,
                kind.policy.mode,
                answer,
            )
            for some in _choices(kind)
        }
        gains = {some: max(through, stopping) for some, (through, stopping) in ways.items()}
        best = max(gains, key=lambda some: (round(gains[some], 2), len(some)))
        through, stopping = ways[best]
        kind.evidence.goes_through = through >= stopping
        needed = (ALONE if rows == 1 else TOGETHER) - (HOLD if kind.on else 0.0)
        return (best if gains[best] >= needed else ()), gains[best]


@lru_cache(maxsize=4 * KINDS)
def _expected(
    costs: StepCosts,
    rows: int,
    shares: tuple[tuple[int, float], ...],
    drafts: int,
    mode: Mode,
    answer: int,
) -> tuple[float, float]:
    """The wall speedup of exits at which such shares of all tokens stop.

    With drafts: of turns through all layers, and of such as stop at the last exit.
    """
    if drafts:
        through, stopping = (
            turns_speedup(costs, rows, dict(shares), drafts, mode, through=one, answer=answer)
            for one in (True, False)
        )
        return through, stopping
    found = speedup(costs, rows, dict(shares), compacts=True)
    return found, found


def _choices(kind: _Kind) -> list[tuple[int, ...]]:
    """Exits that may be on by themselves: the first ones.

    Calibrated thresholds promise something of all exits together. Without the deepest ones the
    promise holds where keys and values are exact (`exitserve.engine.options`).
    """
    if kind.policy.by_layer and kind.policy.mode not in EXACT:
        return [kind.layers]
    return list(accumulate((layer,) for layer in kind.layers))


def _tell(kind: _Kind, rows: int) -> None:
    """Logs that exits went on or off."""
    thresholds = sorted({kind.policy.thresholds_at(layer)[0] for layer in kind.layers})
    policy = f"mode {kind.policy.mode}, threshold {' to '.join(f'{t:g}' for t in thresholds)}"
    expected = "not known yet" if kind.expected is None else f"{kind.expected:.2f}"
    logger.info(
        "Exit layers on for %s: %s. Requests at a time: %d; wall speedup expected: %s. "
        "--exit-checks screened keeps all of them on.",
        policy,
        ", ".join(map(str, kind.on)) or "none",
        rows,
        expected,
    )
