"""From proposals to a choice that keeps its promise: measure, order, test, take the cheapest.

The target's risk belongs to pieces of text, not to tokens: pieces are independent, tokens of one
piece are not. Choices are measured and put in order on one part of the text (`PieceSplit.select`)
and tested on another.

The promise is about tokens, and pieces differ in length. A piece of n tokens with mean risk r
therefore counts as a loss of limit + (r - limit) n / n_max, which lies in [0, 1]. The mean of these
losses is above the limit exactly if the risk, averaged over all tokens, is.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from exitserve.calibration.bounds import Gambler, min_pieces, p_value
from exitserve.calibration.outcomes import Outcome, Summary, summarise
from exitserve.calibration.proposals import Proposal
from exitserve.checkpoint.calibration import OperatingPoint
from exitserve.costs.curves import StepCosts
from exitserve.costs.drafting import Drafting, best_drafts, drafting_speedup
from exitserve.errors import ExitServeError
from exitserve.policy import NUM_DRAFTS, ExitPolicy, Mode

CONFIDENT = 2.0
"""The first choice to be tested is one that, on the pieces for selection, reached the capital
1 / delta raised to this power: a test that fails at its first choice promises nothing."""


@dataclass(frozen=True)
class Target:
    """The share of tokens that must be full depth's."""

    agreement: float

    def __post_init__(self) -> None:
        if not 0.0 < self.agreement < 1.0:
            raise ExitServeError(
                f"--target-agreement must be above 0 and below 1, such as 0.99, not "
                f"{self.agreement:g}."
            )

    @property
    def name(self) -> str:
        """As in the checkpoint, such as `agreement>=0.99`."""
        return f"agreement>={self.agreement:g}"

    @property
    def limit(self) -> float:
        """The mean risk must be at most this."""
        return 1.0 - self.agreement

    def risk(self, one: Outcome) -> float:
        """Mean over the tokens of one piece, from 0 to 1."""
        return 1.0 - one.agreement


def wrong_ends(one: Outcome) -> float | None:
    """Share of a piece's early ends of sequence that are wrong; None where it has none."""
    return one.wrong_ends / one.ends if one.ends else None


@dataclass(frozen=True)
class Choice:
    """A proposal, and what it gave on the pieces for selection."""

    proposal: Proposal
    eos_thresholds: Mapping[int, float]
    """For tokens that end the sequence, by exit layer; 1: they never exit there."""
    outcomes: tuple[Outcome, ...]
    """On the pieces for selection."""

    @property
    def point(self) -> OperatingPoint:
        """Its thresholds, with no promise yet."""
        return OperatingPoint(
            agreement=None,
            thresholds=dict(self.proposal.thresholds),
            eos_thresholds=self.eos_thresholds,
        )

    @property
    def ends_early(self) -> bool:
        """Whether an end of sequence may exit at any layer."""
        return any(threshold < 1.0 for threshold in self.eos_thresholds.values())

    def policy(self, mode: Mode) -> ExitPolicy:
        """The policy of a request that is served with these thresholds."""
        return ExitPolicy.calibrated(self.point, mode=mode)


def relative_cost(choice: Choice, found: Summary, costs: StepCosts, mode: Mode) -> float:
    """Cost of an average token at batch 1, as a share of the cost of a full-depth token."""
    if mode == "confidence":
        return costs.of_tokens(1).of(found.mean_depth, found.checks, found.stays)
    return 1.0 / drafting_speedup(costs, 1, drafting_of(choice, found, costs), found.accepted)


def drafting_of(choice: Choice, found: Summary, costs: StepCosts) -> Drafting:
    """How a server of mode "defer" with these thresholds drafts at batch 1."""
    ((layer, _),) = choice.proposal.thresholds
    way = Drafting(exit_layer=layer, drafts=0, checks=True)
    return replace(way, drafts=best_drafts(costs, 1, way, found.accepted, NUM_DRAFTS))


def weighted_loss(one: Outcome, target: Target, most_tokens: int) -> float:
    """The loss of a piece weighted by its tokens, from 0 to 1: the formula in the header."""
    # Arranged so that rounding never gives a loss below 0.
    share = one.tokens / most_tokens
    return min(1.0, (1.0 - share) * target.limit + share * target.risk(one))


def mean_risk(outcomes: Sequence[Outcome], target: Target) -> float:
    """Mean risk over tokens, of the source where it is greatest."""
    found = []
    for source in {one.source for one in outcomes}:
        own = [one for one in outcomes if one.source == source]
        tokens = sum(one.tokens for one in own)
        found.append(math.fsum(target.risk(one) * one.tokens for one in own) / tokens)
    return max(found)


def by_risk(choices: Iterable[Choice], target: Target) -> list[Choice]:
    """Sorts choices by their mean risk on the pieces for selection, the safest first."""
    return sorted(choices, key=lambda one: mean_risk(one.outcomes, target))


@dataclass
class PromiseTest:
    """Tests choices on the test pieces; a choice runs on each piece at most once."""

    measure: Callable[[Choice, int], Outcome]
    """Runs a choice on the test piece of this index."""
    sources: Sequence[str]
    """Where each test piece is from, in the order in which they are tested."""
    delta: float
    """The greatest p-value with which a choice passes."""
    most_tokens: int
    """Decode tokens of the longest piece."""
    measured: dict[tuple[Proposal, int], Outcome] = field(default_factory=dict)
    """What was run so far, by proposal and piece."""

    def outcome(self, choice: Choice, piece: int) -> Outcome:
        """The outcome of a choice on a piece."""
        key = choice.proposal, piece
        if key not in self.measured:
            self.measured[key] = self.measure(choice, piece)
        return self.measured[key]

    def can_show(self, target: Target) -> bool:
        """Whether there are enough pieces to show the target if every one of them is perfect."""
        least = min_pieces(target.limit, self.delta)
        return min(Counter(self.sources).values(), default=0) >= least

    def p_value(self, choice: Choice, target: Target) -> float:
        """P-value of "the risk is above the limit in some source, or that of early ends is".

        Above `delta`, it may be too small: what cannot change the outcome of the test is not run.
        """
        found = 0.0
        for source in sorted(set(self.sources)):
            found = max(found, self._p_value(choice, target, source))
            if found > self.delta:
                return found  # failed, whatever the others say
        return max(found, self._p_of_ends(choice, target)) if choice.ends_early else found

    def _p_value(self, choice: Choice, target: Target, source: str) -> float:
        pieces = [piece for piece, one in enumerate(self.sources) if one == source]
        gambler = Gambler(target.limit, self.delta, len(pieces))
        for piece in pieces:
            gambler.bet_on(weighted_loss(self.outcome(choice, piece), target, self.most_tokens))
            if gambler.p_value <= self.delta:
                break  # the capital never falls below its highest: the test has passed
        return gambler.p_value

    def _p_of_ends(self, choice: Choice, target: Target) -> float:
        """P-value of "too many early ends of sequence are wrong", over all sources.

        Few pieces have an early end, too few to test each source by itself.
        """
        with_ends = sum(wrong_ends(one) is not None for one in choice.outcomes)
        planned = round(with_ends * len(self.sources) / len(choice.outcomes))
        gambler = Gambler(target.limit, self.delta, planned)
        for piece in range(len(self.sources)):
            wrong = wrong_ends(self.outcome(choice, piece))
            if wrong is not None:
                gambler.bet_on(wrong)
            if gambler.p_value <= self.delta:
                break
        return gambler.p_value

    def summary(self, choice: Choice) -> Summary:
        """Means over all test pieces."""
        return summarise(self.outcome(choice, piece) for piece in range(len(self.sources)))


def test_order(choices: Sequence[Choice], target: Target, trial: PromiseTest) -> list[Choice]:
    """The choices to test, by rising risk, from the riskiest that selection is confident of.

    Safer choices would cost tests and give nothing.
    """
    ordered = by_risk(choices, target)
    start = 0
    for index, choice in enumerate(ordered):
        if is_confident(choice, target, trial):
            start = index
    return ordered[start:]


def is_confident(choice: Choice, target: Target, trial: PromiseTest) -> bool:
    """Whether the pieces for selection say that a choice should pass the test of a target."""
    return _expected(choice, target, trial) >= CONFIDENT * math.log(1.0 / trial.delta)


def _expected(choice: Choice, target: Target, trial: PromiseTest) -> float:
    """Logarithm of the capital that the test should reach, judging by the pieces for selection."""
    found = []
    for source, planned in Counter(trial.sources).items():
        own = [one for one in choice.outcomes if one.source == source]
        own_losses = [weighted_loss(one, target, trial.most_tokens) for one in own]
        repeats = math.ceil(planned / max(1, len(own)))
        losses = (own_losses * repeats)[:planned]
        found.append(-math.log(p_value(losses, target.limit, trial.delta)))
    return min(found)


def passing_choices(
    choices: Sequence[Choice], target: Target, trial: PromiseTest, tried: Callable[[], None]
) -> list[Choice]:
    """The choices that pass the test of a target; empty where there are too few pieces.

    Fixed-sequence testing: in order, until the first that fails. So with probability at least
    1 - delta all that passed keep the target.

    Args:
        choices: all of one criterion.
        target: what they must keep.
        trial: on text that had no part in making the choices.
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
