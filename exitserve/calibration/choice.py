"""From proposals to a choice that keeps its promise: measure, order, test, take the cheapest.

Everything up to the order is done on text of its own (`Parts.select`); the test sees other text.

The promise is about tokens, and pieces differ in length. A piece of n tokens with the mean risk r
therefore counts as limit + (r - limit) n / n_max, which lies in [0, 1], and whose mean is above
the limit exactly if more than that share of all tokens is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from exitserve.calibration.bounds import Gambler, least_pieces, p_value
from exitserve.calibration.outcomes import Outcome, Summary, summary
from exitserve.calibration.proposals import Proposal
from exitserve.calibration.risks import Target, wrong_ends
from exitserve.calibration_record import OperatingPoint
from exitserve.costs import TokenCosts
from exitserve.policy import ExitPolicy, Mode

CONFIDENT = 2.0
"""The first choice tested is one that selection says passes with this many times the capital that
is needed (as a power): a test that fails at its first choice promises nothing."""


@dataclass(frozen=True)
class Candidate:
    """A proposal as selection saw it."""

    proposal: Proposal
    ends: Mapping[int, float]
    """Thresholds for ends of sequence, by exit layer; 1: none leaves early."""
    selected: tuple[Outcome, ...]
    """Of the pieces for selection."""

    @property
    def point(self) -> OperatingPoint:
        """Its thresholds, with no promise yet."""
        return OperatingPoint(
            agreement=None, thresholds=dict(self.proposal.thresholds), eos_thresholds=self.ends
        )

    @property
    def ends_early(self) -> bool:
        """Whether any end of sequence may leave early."""
        return any(threshold < 1.0 for threshold in self.ends.values())

    def policy(self, mode: Mode) -> ExitPolicy:
        """What a request would get."""
        return ExitPolicy.calibrated(self.point, mode=mode)


def cost_of(found: Summary, costs: TokenCosts, mode: Mode) -> float:
    """Of a mean token, as a share of full depth's."""
    propagates = mode == "confidence"
    return costs.of(found.mean_depth, found.checks, found.stays, propagates=propagates)


def weighed(one: Outcome, target: Target, most_tokens: int) -> float:
    """The loss of a piece, from 0 to 1, by its tokens; see the module's header."""
    # The same as in the header, but never below 0 by a rounding error.
    share = one.tokens / most_tokens
    return min(1.0, (1.0 - share) * target.limit + share * target.risk(one))


def mean_risk(outcomes: Sequence[Outcome], target: Target) -> float:
    """The greatest of the sources' mean risks, over tokens."""
    found = []
    for source in {one.source for one in outcomes}:
        own = [one for one in outcomes if one.source == source]
        tokens = sum(one.tokens for one in own)
        found.append(math.fsum(target.risk(one) * one.tokens for one in own) / tokens)
    return max(found)


def in_order(candidates: Iterable[Candidate], target: Target) -> list[Candidate]:
    """By their risk on the pieces for selection, the safest first."""
    return sorted(candidates, key=lambda one: mean_risk(one.selected, target))


@dataclass
class Trial:
    """Tests candidates, each on every piece once at most."""

    run: Callable[[Candidate, int], Outcome]
    """Runs a candidate on test piece number i."""
    sources: Sequence[str]
    """[number of test pieces] where each is from, in the order of the test."""
    delta: float
    most_tokens: int
    """Of a piece."""
    _seen: dict[tuple[Proposal, int], Outcome] = field(default_factory=dict)

    def outcome(self, candidate: Candidate, piece: int) -> Outcome:
        """What the candidate makes of a piece."""
        key = candidate.proposal, piece
        if key not in self._seen:
            self._seen[key] = self.run(candidate, piece)
        return self._seen[key]

    def can_show(self, target: Target) -> bool:
        """Whether there are pieces enough for the target, were they all perfect."""
        least = least_pieces(target.limit, self.delta, target.perfect)
        return min(Counter(self.sources).values(), default=0) >= least

    def p_value(self, candidate: Candidate, target: Target) -> float:
        """Of "its risk is above the limit for some source, or that of its early ends is"."""
        found = max(self._p_value(candidate, target, one) for one in sorted(set(self.sources)))
        return max(found, self._p_of_ends(candidate, target)) if candidate.ends_early else found

    def _p_value(self, candidate: Candidate, target: Target, source: str) -> float:
        pieces = [piece for piece, one in enumerate(self.sources) if one == source]
        gambler = Gambler(target.limit, self.delta, len(pieces))
        for piece in pieces:
            gambler.sees(weighed(self.outcome(candidate, piece), target, self.most_tokens))
            if gambler.p_value <= self.delta:
                break  # a gambler who has won may leave
        return gambler.p_value

    def _p_of_ends(self, candidate: Candidate, target: Target) -> float:
        """Of "too many early ends are wrong", over all sources: most text has none at all."""
        selected = sum(wrong_ends(one) is not None for one in candidate.selected)
        planned = round(selected * len(self.sources) / len(candidate.selected))
        gambler = Gambler(end_limit(target), self.delta, planned)
        for piece in range(len(self.sources)):
            wrong = wrong_ends(self.outcome(candidate, piece))
            if wrong is not None:
                gambler.sees(wrong)
            if gambler.p_value <= self.delta:
                break
        return gambler.p_value

    def found(self, candidate: Candidate) -> Summary:
        """All of its outcomes on the test's pieces."""
        return summary(self.outcome(candidate, piece) for piece in range(len(self.sources)))


def end_limit(target: Target) -> float:
    """How many early ends of sequence may be wrong, as a share of them."""
    return 0.01 if target.agreement is None else 1.0 - target.agreement


def sequence(candidates: Sequence[Candidate], target: Target, trial: Trial) -> list[Candidate]:
    """The candidates to test, in order, from the riskiest of which selection is confident.

    Candidates that are safer than it would have to be tested first for nothing.
    """
    ordered = in_order(candidates, target)
    start = 0
    for index, candidate in enumerate(ordered):
        if _expected(candidate, target, trial) >= CONFIDENT * math.log(1.0 / trial.delta):
            start = index
    return ordered[start:]


def _expected(candidate: Candidate, target: Target, trial: Trial) -> float:
    """The capital (its logarithm) that selection leads one to expect of the test."""
    found = []
    for source, planned in Counter(trial.sources).items():
        own = [one for one in candidate.selected if one.source == source]
        seen = [weighed(one, target, trial.most_tokens) for one in own]
        losses = (seen * math.ceil(planned / len(seen)))[:planned] if seen else []
        found.append(-math.log(p_value(losses, target.limit, trial.delta)))
    return min(found)


def kept(
    candidates: Sequence[Candidate], target: Target, trial: Trial, tried: Callable[[], None]
) -> list[Candidate]:
    """Those that keep the target together, with the trial's level; empty if none can be shown to.

    Fixed-sequence testing: in order, until the first that fails.

    Args:
        candidates: of one criterion.
        target: what to keep.
        trial: on text that had no part in the candidates.
        tried: called after each test.
    """
    if not candidates or not trial.can_show(target):
        return []
    keeping = []
    for candidate in sequence(candidates, target, trial):
        passes = trial.p_value(candidate, target) <= trial.delta
        tried()
        if not passes:
            break
        keeping.append(candidate)
    return keeping
