"""Finite-sample tests that a choice of thresholds keeps its target.

Learn then Test (Angelopoulos, Bates, Candes, Jordan and Lei 2021, arXiv 2110.01052): each choice
of thresholds is a hypothesis, "its risk is above the limit", tested on text that had no part in
proposing it. Choices are tested in an order fixed beforehand, the safest first, until one cannot be
rejected; with probability at least 1 - delta, all those rejected before it keep the limit
(fixed-sequence testing, their section 3). The order comes from other text, as in Pareto Testing
(Laufer-Goldshtein, Fisch, Barzilay and Jaakkola 2023, arXiv 2210.07913).

The test is a betting test (Waudby-Smith and Ramdas 2024, "Estimating means of bounded random
variables by betting", JRSS B 86(1), section 4): under the hypothesis, the capital of a gambler who
bets that losses are below the limit is a nonnegative supermartingale that begins at 1, so by
Ville's inequality it ever reaches 1 / delta with probability at most delta. It needs losses in
[0, 1] and drawn independently, nothing else: no normality, no large sample.
"""

import math
from collections.abc import Sequence

BOLDNESS = 0.95
"""Largest bet, as a share of the one that would lose all capital at a loss of 1."""
LONG = 20_000
"""Number of losses from which `min_pieces` trusts its estimate instead of trying it out."""


class Gambler:
    """Bets, loss after loss, that their mean is below a limit.

    Bets are the predictable plug-in of Waudby-Smith and Ramdas (their equation 26): each depends
    on the losses before it alone, so that looking after every loss is allowed.
    """

    def __init__(self, limit: float, delta: float, planned: int) -> None:
        """Begins with a capital of 1.

        Args:
            limit: above 0 and below 1.
            delta: level for which the bets are tuned; the test is valid at any level.
            planned: number of losses expected, for the size of the bets.
        """
        assert 0.0 < limit < 1.0, limit
        self._limit = limit
        self._boldest = BOLDNESS / (1.0 - limit)
        self._aim = 2.0 * math.log(1.0 / delta) / max(1, planned)
        # Regularised by one loss of mean `limit`, with the largest variance that such losses can
        # have. (Waudby-Smith and Ramdas take 1/2 and 1/4; where the limit is small, losses vary far
        # less, and bets that expect so much stay timid for hundreds of losses.)
        self._count, self._total, self._squares = 1, limit, limit * (1.0 - limit)
        self._capital = self._highest = 0.0

    def bet_on(self, loss: float) -> None:
        """Bets on one more loss."""
        assert 0.0 <= loss <= 1.0, "else the theorem says nothing"
        bet = min(self._boldest, math.sqrt(self._aim * self._count / self._squares))
        self._capital += math.log1p(bet * (self._limit - loss))
        self._highest = max(self._highest, self._capital)
        self._count += 1
        self._total += loss
        self._squares += (loss - self._total / self._count) ** 2

    @property
    def p_value(self) -> float:
        """P-value of "the mean loss is at least the limit": 1 over the highest capital so far."""
        return math.exp(-self._highest)


def p_value(losses: Sequence[float], limit: float, delta: float) -> float:
    """A gambler's p-value after all planned `losses`; other arguments as in `Gambler`."""
    gambler = Gambler(limit, delta, len(losses))
    for loss in losses:
        gambler.bet_on(loss)
    return gambler.p_value


def min_pieces(limit: float, delta: float) -> int:
    """The fewest losses with which a test of `limit` at `delta` passes, if all are 0."""
    boldest = math.log1p(BOLDNESS / (1.0 - limit) * limit)
    count = max(1, math.floor(math.log(1.0 / delta) / boldest))
    # The first bets are smaller, so a few more are needed; in long tests that hardly matters.
    while count < LONG and p_value([0.0] * count, limit, delta) > delta:
        count = math.ceil(1.02 * count + 1)
    return count
