"""Measures choices where they are needed: near a target, of which there are few.

Each measurement is a pass of the oracle over every piece for selection. Risk grows along the
proposals (up to noise, which costs a little of the best choice and nothing of the promise), so
halving finds where a target ends.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from exitserve.calibration.choice import Choice, PromiseTest, Target, is_confident, mean_risk
from exitserve.calibration.proposals import PRICES, Proposal, interpolated


class Selection:
    """The proposals of one criterion, and what those that were needed gave."""

    def __init__(
        self,
        proposals: Sequence[Proposal],
        measure: Callable[[Proposal], Choice],
        *,
        cheap: bool = False,
    ) -> None:
        """Measures nothing yet.

        Args:
            proposals: by falling price of a wrong token.
            measure: runs a proposal on the pieces for selection.
            cheap: whether that needs no pass of the oracle, so that many more may be measured.
        """
        self._proposals, self._measure, self._cheap = proposals, measure, cheap
        self._measured: dict[Proposal, Choice] = {}

    @property
    def choices(self) -> list[Choice]:
        """All that were measured."""
        return list(self._measured.values())

    def find(self, target: Target) -> int:
        """Measures choices on both sides of a target.

        Returns:
            Where the riskiest that keeps it is among proposals by rising risk; -1: none does.
        """
        ordered = self._proposals
        inside, outside = -1, len(ordered)
        while outside - inside > 1:
            middle = (inside + outside) // 2
            if mean_risk(self._choice(ordered[middle]).outcomes, target) <= target.limit:
                inside = middle
            else:
                outside = middle
        return inside

    def refine(self, target: Target, trial: PromiseTest) -> None:
        """Measures the choices among which the best that passes the test of a target should be.

        They lead from one that is expected to pass to the first that does not keep the target.
        """
        ordered = self._proposals
        safe = keeps = self.find(target)
        while safe >= 0 and not is_confident(self._choice(ordered[safe]), target, trial):
            safe -= 1
        path = list(ordered[max(0, safe) : (keeps if self._cheap else safe) + 2])
        if safe < 0 and path:
            path.insert(0, Proposal(path[0].criterion, (), 2.0 * PRICES[0]))  # no exits
        for ends in pairwise(path):
            for proposal in interpolated(*ends):
                self._choice(proposal)

    def _choice(self, proposal: Proposal) -> Choice:
        if proposal not in self._measured:
            self._measured[proposal] = self._measure(proposal)
        return self._measured[proposal]
