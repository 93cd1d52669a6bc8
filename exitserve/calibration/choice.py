"""From proposals to a choice that keeps its promise: measure, order, test, take the cheapest.

Choices are measured and put in order on one part of the text (`PieceSplit.select`) and tested on
another.

The promise is about tokens, and pieces differ in length. A piece of n tokens with mean risk r
therefore counts as a loss of limit + (r - limit) n / n_max, which lies in [0, 1]. The mean of these
losses is above the limit exactly if the risk, averaged over all tokens, is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from exitserve.calibration.bounds import Gambler, min_pieces, p_value
from exitserve.calibration.outcomes import Outcome, Summary, summarise
from exitserve.calibration.proposals import Proposal
from exitserve.calibration.risks import Target, wrong_ends
from exitserve.calibration_record import OperatingPoint
from exitserve.costs import TokenCosts
from exitserve.policy import ExitPolicy, Mode

CONFIDENT = 2.0
"""The first choice tested is one that selection says passes with this many times the capital that
is needed (as a power): a test that fails at its first choice promises nothing."""


@dataclass(frozen=True)
class Choice:
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


def relative_cost(found: Summary, costs: TokenCosts, mode: Mode) -> float:
    """Of a mean token, as a share of full depth's."""
    propagates = mode == "confidence"
    return costs.of(found.mean_depth, found.checks, found.stays, propagates=propagates)


def weighted_loss(one: Outcome, target: Target, most_tokens: int) -> float:
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


def by_risk(choices: Iterable[Choice], target: Target) -> list[Choice]:
    """By their risk on the pieces for selection, the safest first."""
    return sorted(choices, key=lambda one: mean_risk(one.selected, target))


@dataclass
class PromiseTest:
    """Tests choices, each on every piece once at most."""

    measure: Callable[[Choice, int], Outcome]
    """Runs a choice on test piece number i."""
    sources: Sequence[str]
    """[number of test pieces] where each is from, in the order of the test."""
    delta: float
    most_tokens: int
    """Of a piece."""
    _seen: dict[tuple[Proposal, int], Outcome] = field(default_factory=dict)

    def outcome(self, choice: Choice, piece: int) -> Outcome:
        """What the choice makes of a piece."""
        key = choice.proposal, piece
        if key not in self._seen:
            self._seen[key] = self.measure(choice, piece)
        return self._seen[key]

    def can_show(self, target: Target) -> bool:
        """Whether there are pieces enough for the target, were they all perfect."""
        least = min_pieces(target.limit, self.delta, target.perfect)
        return min(Counter(self.sources).values(), default=0) >= least

    def p_value(self, choice: Choice, target: Target) -> float:
        """Of "its risk is above the limit for some source, or that of its early ends is"."""
        found = max(self._p_value(choice, target, one) for one in sorted(set(self.sources)))
        return max(found, self._p_of_ends(choice, target)) if choice.ends_early else found

    def _p_value(self, choice: Choice, target: Target, source: str) -> float:
        pieces = [piece for piece, one in enumerate(self.sources) if one == source]
        gambler = Gambler(target.limit, self.delta, len(pieces))
        for piece in pieces:
            gambler.bet_on(weighted_loss(self.outcome(choice, piece), target, self.most_tokens))
            if gambler.p_value <= self.delta:
                break  # a gambler who has won may leave
        return gambler.p_value

    def _p_of_ends(self, choice: Choice, target: Target) -> float:
        """Of "too many early ends are wrong", over all sources: most text has none at all."""
        selected = sum(wrong_ends(one) is not None for one in choice.selected)
        planned = round(selected * len(self.sources) / len(choice.selected))
        gambler = Gambler(end_limit(target), self.delta, planned)
        for piece in range(len(self.sources)):
            wrong = wrong_ends(self.outcome(choice, piece))
            if wrong is not None:
                gambler.bet_on(wrong)
            if gambler.p_value <= self.delta:
                break
        return gambler.p_value

    def found(self, choice: Choice) -> Summary:
        """All of its outcomes on the test's pieces."""
        return summarise(self.outcome(choice, piece) for piece in range(len(self.sources)))


def end_limit(target: Target) -> float:
    """How many early ends of sequence may be wrong, as a share of them."""
    return 0.01 if target.agreement is None else 1.0 - target.agreement


def test_order(choices: Sequence[Choice], target: Target, trial: PromiseTest) -> list[Choice]:
    """The choices to test, in order, from the riskiest of which selection is confident.

    Candidates that are safer than it would have to be tested first for nothing.
    """
    ordered = by_risk(choices, target)
    start = 0
    for index, choice in enumerate(ordered):
        if _expected(choice, target, trial) >= CONFIDENT * math.log(1.0 / trial.delta):
            start = index
    return ordered[start:]


def _expected(choice: Choice, target: Target, trial: PromiseTest) -> float:
    """The capital (its logarithm) that selection leads one to expect of the test."""
    found = []
    for source, planned in Counter(trial.sources).items():
        own = [one for one in choice.selected if one.source == source]
        seen = [weighted_loss(one, target, trial.most_tokens) for one in own]
        losses = (seen * math.ceil(planned / len(seen)))[:planned] if seen else []
        found.append(-math.log(p_value(losses, target.limit, trial.delta)))
    return min(found)


def passing_choices(
    choices: Sequence[Choice],
    target: Target,
    trial: PromiseTest,
    tried: Callable[[], None],
) -> list[Choice]:
    """Those that keep the target together, with the trial's level; empty if none can be shown to.

    Fixed-sequence testing: in order, until the first that fails.

    Args:
        choices: of one criterion.
        target: what to keep.
        trial: on text that had no part in the choices.
        tried: called after each test.
    """
    if not choices or not trial.can_show(target):
        return []
    keeping = []
    for choice in test_order(choices, target, trial):
        passes = trial.p_value(choice, target) <= trial.delta
        tried()
        if not passes:
            break
        keeping.append(choice)
    return keeping
