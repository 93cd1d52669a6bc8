"""Which of two ways of decoding is faster, measured while serving.

Mode "verify" may draft after a pass, or not; in mode "defer" rows may leave at their exits, or be
checked behind the last layer (`exitserve.engine.host.late_checks`). What pays depends on the
machine, the model, how many requests are in the batch, and how often they exit. So both ways are
tried by turns, and timed, for each number of rows and each exit policy; the slower one is tried
again now and then, the more seldom the more it lost.

What a request gets does not depend on it: its tokens are the same either way. (Requests sampled
with a seed never draft, since drafts would use up their random numbers.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass

from exitserve.policy import ExitPolicy

FIRST = 2
"""Passes that draft, or let rows leave, before anything is known."""
BURST = {True: 10, False: 5}
"""Passes of each way in a duel. Those with exits differ: one is over at the first, the next runs
all layers for itself and for tokens before it. Those without are all alike."""
WINS = 3
"""Duels that decide a trial."""
PATIENCE = 2.0
"""A burst ends early when it has lost as much time as so many passes of the other way take."""
SHARE = 0.005
"""What trials of the loser may cost, as a share of all time; half as much each time that it loses
again ..."""
SHORTEST_REST, LONGEST_REST = 128, 8192
"""... within so many passes between two of them."""
KINDS = 64
"""Kinds of batches that are remembered, those that were seen last."""


@dataclass
class _Burst:
    """Some passes of one way of decoding, one after the other."""

    seconds: float = 0.0
    tokens: int = 0
    passes: int = 0

    def took(self, seconds: float, tokens: int) -> None:
        self.seconds, self.tokens = self.seconds + seconds, self.tokens + tokens
        self.passes += 1

    def lost(self, other: _Burst) -> float:
        """How much longer it took than the other way would have for its tokens, in passes of that
        way."""
        took = self.seconds / other.seconds - self.tokens / other.tokens
        return took * other.passes


class _Duel:
    """A burst of one way, and then one of the other.

    So both run while the machine is as fast or as slow, and who is interrupted loses no more than
    this.
    """

    def __init__(self, first: bool, passes: int) -> None:
        """Starts with `passes` passes of the way that runs first."""
        self.way = first
        """That of the next pass."""
        self._first, self._passes = first, passes
        self._bursts = {True: _Burst(), False: _Burst()}

    def took(self, seconds: float, tokens: int) -> bool:
        """Notes a pass; returns whether it was the last."""
        own = self._bursts[self.way]
        own.took(seconds, tokens)
        if self.way != self._first:
            return own.passes >= BURST[self.way] or self.lost > PATIENCE
        if own.passes >= self._passes:
            self.way = not self.way
        return False

    @property
    def lost(self) -> float:
        """What the second way lost by its burst, in passes of the first; less than 0 if it won."""
        return self._bursts[not self._first].lost(self._bursts[self._first])

    @property
    def winner(self) -> bool:
        """The way that was faster."""
        return self._first if self.lost > 0 else not self._first


class _Contest:
    """One way against the other, at one number of rows: now and then the best of five duels."""

    def __init__(self, winner: bool | None) -> None:
        """Starts without experience, or with a winner that is likely."""
        self.winner = winner
        self._rest = 0 if winner is None else SHORTEST_REST
        """Passes left until the loser is tried again; 0 during a trial."""
        self._defeats = 0
        """Trials that the loser lost since it last won."""
        self._duel = _Duel(True, FIRST)
        self._won = {True: 0, False: 0}
        """Duels of this trial."""
        self._lost = 0.0
        """Passes of the winner's that they cost."""

    def choose(self) -> bool:
        """The way of the next pass."""
        return bool(self.winner) if self._rest else self._duel.way

    def took(self, way: bool, seconds: float, tokens: int) -> None:
        """Notes a pass."""
        if self._rest:
            self._rest -= 1
            if not self._rest:
                self._won, self._lost = {True: 0, False: 0}, 0.0
                self._start_duel()
        elif way == self._duel.way and self._duel.took(seconds, tokens):
            self._won[self._duel.winner] += 1
            # What lost more was interrupted.
            self._lost += min(max(0.0, self._duel.lost), PATIENCE)
            if max(self._won.values()) < WINS:
                self._start_duel()
            else:
                self._settle()

    def _start_duel(self) -> None:
        first = bool(self.winner)  # what it took tells when the other has lost enough
        self._duel = _Duel(first, BURST[first])

    def _settle(self) -> None:
        best = self._won[True] > self._won[False]
        self._defeats = self._defeats + 1 if best == self.winner else 0
        self.winner = best
        earned = self._lost / SHARE * 2**self._defeats
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
