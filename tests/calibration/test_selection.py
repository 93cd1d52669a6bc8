"""Few choices are measured, and they are those that count."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from exitserve.calibration import choice
from exitserve.calibration.choice import Choice, PromiseTest, is_confident, mean_risk
from exitserve.calibration.outcomes import Outcome
from exitserve.calibration.proposals import BETWEEN, PRICES, Proposal
from exitserve.calibration.risks import Target, agreement_target, depth_target
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
    [*(agreement_target(one) for one in (0.999, 0.98, 0.9, 0.5, 0.01)), depth_target(9, LAYERS)],
    ids=lambda one: one.name,
)
def test_halving_finds_where_a_target_ends(target: Target) -> None:
    selection = Counted()
    found = selection.find(target)
    ordered = PROPOSALS if target.grows else PROPOSALS[::-1]
    kept = [mean_risk(measured(one).outcomes, target) <= target.limit for one in ordered]
    assert kept == [index <= found for index in range(len(ordered))]
    assert len(selection.ran) <= math.ceil(math.log2(len(ordered) + 1))
    beside = {ordered[index] for index in (found, found + 1) if 0 <= index < len(ordered)}
    assert beside <= {one.proposal for one in selection.choices}


@pytest.mark.parametrize("pieces", [60, 200, 2000])
@pytest.mark.parametrize("least", [0.98, 0.9, 0.7])
def test_a_test_begins_where_it_would_among_all_choices(least: float, pieces: int) -> None:
    """And finer choices lie beyond."""
    target = agreement_target(least)
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


def test_choices_that_cost_nothing_are_fine_all_the_way_to_the_target() -> None:
    """The test may well pass beyond the first that it is expected to pass."""
    target = agreement_target(0.9)
    few, many = Counted(), Counted(cheap=True)
    for one in (few, many):
        one.refine(target, trial(60))
    risks = sorted(mean_risk(one.outcomes, target) for one in many.choices)
    within = [risk for risk in risks if 0.05 < risk < 0.1]
    assert len(within) > 5 and max(b - a for a, b in pairwise(within)) < 0.01
    assert len(many.choices) > len(few.choices)


def test_where_even_the_safest_is_too_risky() -> None:
    selection = Counted(PROPOSALS[8:])
    selection.refine(agreement_target(0.98), trial(2000))
    safer = [one for one in selection.ran if one.price > PROPOSALS[8].price]
    assert len(safer) == BETWEEN
    assert min(dict(one.thresholds)[6] for one in safer) > dict(PROPOSALS[8].thresholds)[6]


def test_without_proposals_there_is_nothing_to_measure() -> None:
    selection = Counted([])
    selection.refine(agreement_target(0.9), trial(100))
    assert selection.choices == []
