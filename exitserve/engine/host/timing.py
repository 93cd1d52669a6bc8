"""Which of two ways of decoding is faster, measured while serving.

Mode "verify" may draft after a pass, or not; in mode "defer" rows may leave at their exits, or be
checked behind the last layer (`exitserve.engine.host.late_checks`). What pays depends on the
machine, the model, how many requests are in the batch, and how often they exit. So both ways are
tried, and timed, for each number of rows and each exit policy; the slower one is tried again now
and then, the more seldom the more it lost.

What a request gets does not depend on it: its tokens are the same either way. (Requests sampled
with a seed never draft, since drafts would use up their random numbers.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field

from exitserve.policy import ExitPolicy

FIRST = 3
"""Passes that draft, or let rows leave, before anything is known."""
TRIALS = {True: 24, False: 6}
"""Passes of a trial. Those with exits differ: one is over at the first, the next runs all layers
for itself and for tokens before it. Those without are all alike."""
MEMORY = 48
"""Passes of each way that count."""
PATIENCE = 3.0
"""A trial ends early when it has lost as much time as so many passes of the other way take."""
SHARE = 0.01
"""What trials of the loser may cost, as a share of all time; half as much each time that it loses
again ..."""
SHORTEST_REST, LONGEST_REST = 128, 8192
"""... within so many passes between two of them."""
FEW, PAUSE = 6, 5.0
"""Once a few passes are known, one that takes this many times the usual was interrupted, and does
not count."""
KINDS = 64
"""Kinds of batches that are remembered, those that were seen last."""


@dataclass
class _Way:
    """The last passes of one way of decoding: (seconds, tokens) of each."""

    passes: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MEMORY))

    def took(self, seconds: float, tokens: int) -> None:
        if len(self.passes) < FEW or seconds < PAUSE * self.seconds_per_pass():
            self.passes.append((seconds, tokens))

    def seconds_per_pass(self) -> float:
        return sum(seconds for seconds, _ in self.passes) / len(self.passes)

    def seconds_per_token(self) -> float:
        return sum(seconds for seconds, _ in self.passes) / sum(n for _, n in self.passes)


class _Contest:
    """One way against the other, at one number of rows."""

    def __init__(self, winner: bool | None) -> None:
        """Starts without experience, or with a winner that is likely."""
        self.winner = winner
        self.ways = {True: _Way(), False: _Way()}
        self._trials: list[tuple[bool, int]] = []
        """Those to come, the first of which runs: the way, and passes left; none while the winner
        rests."""
        if winner is None:
            self._trials = [(True, FIRST), (False, TRIALS[False]), (True, TRIALS[True])]
        self._rest = SHORTEST_REST
        """Passes left until the loser is tried again."""
        self._defeats = 0
        """Trials that the loser lost since it last won."""
        self._lost = 0.0
        """Seconds that the trial took more than the other way would have."""

    def choose(self) -> bool:
        """The way of the next pass."""
        return self._trials[0][0] if self._trials else bool(self.winner)

    def took(self, way: bool, seconds: float, tokens: int) -> None:
        """Notes a pass."""
        self.ways[way].took(seconds, tokens)
        if not self._trials:
            self._rest -= 1
            if self._rest <= 0:
                self.ways[not self.winner].passes.clear()
                self._trials = [(not self.winner, TRIALS[not self.winner])]
        elif way == self._trials[0][0]:
            self._go_on(seconds, tokens)

    def _go_on(self, seconds: float, tokens: int) -> None:
        """A pass of the trial that runs."""
        (way, left), *later = self._trials
        other, left = self.ways[not way], left - 1
        if other.passes:
            self._lost += seconds - tokens * other.seconds_per_token()
            if self._lost > PATIENCE * other.seconds_per_pass():
                left = 0
        if left:
            self._trials[0] = way, left
            return
        if not later:
            self._settle()
        self._trials, self._lost = later, 0.0

    def _settle(self) -> None:
        exits, plain = self.ways[True], self.ways[False]
        best = exits.seconds_per_token() <= plain.seconds_per_token()
        self._defeats = self._defeats + 1 if best == self.winner else 0
        self.winner = best
        earned = self._lost / (SHARE * self.ways[best].seconds_per_pass()) * 2**self._defeats
        self._rest = round(min(max(earned, SHORTEST_REST), LONGEST_REST))


class PassTiming:
    """Decides, pass by pass, whether rows draft or leave (True), or neither (False)."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        agree: Callable[[bool], bool] = lambda chosen: chosen,
    ) -> None:
        """Starts without experience: True is tried first.

        Args:
            clock: in seconds.
            agree: gives all ranks the same choice.
        """
        self._clock, self._agree = clock, agree
        self._contests: dict[Hashable, dict[int, _Contest]] = {}
        """By kind of batch and number of rows; the kind that was seen last is the last."""
        self._last: tuple[float, tuple[str, ...], bool] | None = None

    def choose(
        self,
        requests: tuple[str, ...],
        tokens: int,
        *,
        steady: bool,
        policies: Collection[ExitPolicy] = (),
    ) -> bool:
        """The way of what comes now.

        Args:
            requests: those of the batch that it concerns; times are compared only between
                passes of the same ones.
            policies: theirs; what pays with one may not with another.
            tokens: generated since the last call, for all of these requests together.
            steady: what lay between was one pass that did nothing but decode.
        """
        now = self._clock()
        contest = self._contest(self._contests_of(policies), len(requests))
        if self._last is not None and steady:
            since, before, way = self._last
            if before == requests:
                contest.took(way, now - since, tokens)
        way = self._agree(contest.choose())
        self._last = (now, requests, way)
        return way

    def _contests_of(self, policies: Collection[ExitPolicy]) -> dict[int, _Contest]:
        """Those of a kind of batch: of one policy, or else of the modes of several.

        Mixtures of policies are too many for each to gather experience of its own.
        """
        kinds = set(policies)
        key = kinds.pop() if len(kinds) == 1 else frozenset(one.mode for one in kinds)
        found = self._contests[key] = self._contests.pop(key, {})
        if len(self._contests) > KINDS:
            del self._contests[next(iter(self._contests))]
        return found

    @staticmethod
    def _contest(contests: dict[int, _Contest], rows: int) -> _Contest:
        """The contest of so many rows.

        What loses with fewer rows is taken to lose with more, until it is tried.
        """
        if rows not in contests:
            won = {other: one.winner for other, one in contests.items()}
            winner = None
            if any(way is False and other < rows for other, way in won.items()):
                winner = False
            elif any(way and other > rows for other, way in won.items()):
                winner = True
            contests[rows] = _Contest(winner)
        return contests[rows]
