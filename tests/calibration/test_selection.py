"""Few choices are measured, and they are those that count."""

import math

import pytest

from exitserve.calibration import choice
from exitserve.calibration.choice import (
    Choice,
    PromiseTest,
    Target,
    is_confident,
    mean_risk,
)
from exitserve.calibration.outcomes import Outcome
from exitserve.calibration.proposals import BETWEEN, PRICES, Proposal
from exitserve.calibration.selection import Selection

LAYERS = 10
PIECES = 60
DELTA = 0.05
RISING = tuple(0.01 * 1.5**step for step in range(len(PRICES)))
"""Risk of a proposal at each price."""
PROPOSALS = [
    Proposal("margin", ((6, 1.0 - risk),), p) for risk, p in zip(RISING, PRICES, strict=True)
]


def measured(proposal: Proposal) -> Choice:
    """The lower its threshold, the more often it is wrong, and the earlier tokens exit."""
    thresholds = dict(proposal.thresholds)
    wrong = 1.0 - thresholds[6] if thresholds else 0.0
    one = Outcome(
        source="text",
        tokens=100,
        agreement=1.0 - wrong,
        depth=LAYERS * (1.0 - wrong),
        checks=1.0,
        stays=0.5,
        nats=2.0,
        full_nats=2.0,
        ends=0,
        wrong_ends=0,
    )
    return Choice(proposal, {6: 1.0}, (one,) * PIECES)


class Counted(Selection):
    """Keeps the proposals that it ran, in that order."""

    def __init__(self, proposals: list[Proposal] = PROPOSALS, *, cheap: bool = False) -> None:
        self.ran: list[Proposal] = []

        def measure(proposal: Proposal) -> Choice:
            self.ran.append(proposal)
            return measured(proposal)

        super().__init__(proposals, measure, cheap=cheap)


def trial(pieces: int) -> PromiseTest:
    return PromiseTest(lambda one, _: one.outcomes[0], ["text"] * pieces, DELTA, 100)


@pytest.mark.parametrize(
    "target",
    [Target(one) for one in (0.999, 0.98, 0.9, 0.5, 0.01)],
    ids=lambda one: one.name,
)
def test_halving_finds_where_a_target_ends(target: Target) -> None:
    selection = Counted()
    found = selection.find(target)
    ordered = PROPOSALS
    kept = [mean_risk(measured(one).outcomes, target) <= target.limit for one in ordered]
    assert kept == [index <= found for index in range(len(ordered))]
    assert len(selection.ran) <= math.ceil(math.log2(len(ordered) + 1))
    beside = {ordered[index] for index in (found, found + 1) if 0 <= index < len(ordered)}
    assert beside <= {one.proposal for one in selection.choices}


@pytest.mark.parametrize("pieces", [60, 200, 2000])
@pytest.mark.parametrize("least", [0.98, 0.9, 0.7])
def test_a_test_begins_where_it_would_among_all_choices(least: float, pieces: int) -> None:
    """And finer choices lie beyond."""
    target = Target(least)
    selection = Counted()
    selection.refine(target, trial(pieces))
    everything = [*map(measured, PROPOSALS)]
    (first, second, *_) = choice.test_order(everything, target, trial(pieces))
    ran = {one.proposal for one in selection.choices}
    if is_confident(first, target, trial(pieces)):
        assert {first.proposal, second.proposal} <= ran
        assert len(ran) <= BETWEEN + 6
    else:
        assert PROPOSALS[0] in ran
    finer = ran - set(PROPOSALS)
    assert len(finer) == BETWEEN
    assert len(selection.ran) == len(ran), "none runs twice"
