"""Stepping aside, on a clock that the test moves."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from exitserve.engine.host.timing import KINDS, PassTiming
from exitserve.policy import ExitPolicy

Cost = Callable[[bool], tuple[float, int]]
"""Seconds of a pass after which rows drafted or not, and the tokens that it gave."""


class Server:
    """Decodes one batch for ever."""

    def __init__(self, seed: int = 1) -> None:
        self.now = 0.0
        self.paying = PassTiming(lambda: self.now)
        self.numbers = random.Random(seed)

    def run(
        self,
        passes: int,
        cost: Cost,
        requests: tuple[str, ...] = ("a",),
        policies: tuple[ExitPolicy, ...] = (),
    ) -> float:
        """The share of passes that drafted."""
        drafted, tokens = 0, 1
        for _ in range(passes):
            way = self.paying.choose(requests, tokens, steady=True, policies=policies)
            drafted += way
            seconds, tokens = cost(way)
            self.now += seconds * self.numbers.uniform(0.9, 1.1)
        return drafted / passes


def costs(drafting: float, tokens: int, plain: float = 1.0) -> Cost:
    """Not drafting takes `plain` seconds for a token."""
    return lambda way: (drafting, tokens) if way else (plain, 1)


@pytest.mark.parametrize(("seconds", "tokens", "pays"), [(2.0, 3, True), (2.0, 1, False)])
def test_the_faster_way_is_taken(seconds: float, tokens: int, pays: bool) -> None:
    server = Server()
    server.run(50, costs(seconds, tokens))
    share = server.run(2000, costs(seconds, tokens))
    assert share > 0.95 if pays else share < 0.03


def test_trials_cost_less_than_three_percent() -> None:
    """Drafting that takes twice the time, from the first pass on."""
    server, passes = Server(), 1000
    server.run(passes, costs(2.0, 1))
    assert server.now < 1.03 * passes


def test_a_trial_that_is_dear_ends_early_and_is_seldom() -> None:
    """Eight rows that draft eight tokens each on a core that computes: six times the time."""
    server, passes = Server(), 1000
    assert server.run(60, costs(6.0, 2)) <= 4 / 60
    server.run(passes - 60, costs(6.0, 2))
    assert server.now < 1.05 * passes, "and every pass that drafted gave two tokens"


def test_it_changes_its_mind() -> None:
    server = Server()
    server.run(500, costs(2.0, 1))
    assert server.run(4000, costs(2.0, 4)) > 0.8


@pytest.mark.parametrize(("seconds", "pays"), [(1.7, True), (2.3, False)])
def test_a_machine_that_is_slower_by_turns_deceives_it_seldom(seconds: float, pays: bool) -> None:
    """Up to twice the time for 70 passes, whatever is done; a draft gives two tokens.

    If each way were timed by itself, up to a third of a server's passes would be mistaken.
    """
    rounds = 60
    for seed in range(10):
        server, wrong = Server(seed), 0.0
        for _ in range(rounds):
            slower = server.numbers.uniform(1.0, 2.0)
            share = server.run(70, costs(seconds * slower, 2, plain=slower))
            wrong += (1 - share if pays else share) / rounds
        assert wrong < 0.04


def test_one_interruption_decides_nothing() -> None:
    server = Server()
    server.run(100, costs(2.0, 3))
    server.now += 300.0
    assert server.run(60, costs(2.0, 3)) > 0.85


def test_another_batch_is_another_contest() -> None:
    server = Server()
    server.run(500, costs(2.0, 4), requests=("a",))
    batch = tuple("bcdefghi")
    server.run(50, costs(2.0, 1), requests=batch)
    assert server.run(500, costs(2.0, 1), requests=batch) < 0.05
    assert server.run(500, costs(2.0, 4), requests=("a",)) > 0.95


def test_passes_with_prompts_do_not_count() -> None:
    server = Server()
    for _ in range(500):
        assert server.paying.choose(("a",), 1, steady=False), "nothing is known yet"
        server.now += 1.0


def test_what_loses_with_fewer_rows_is_not_tried_at_once_with_more() -> None:
    server = Server()
    server.run(200, costs(2.0, 1), requests=("a", "b"))
    assert server.run(100, costs(2.0, 1), requests=("a", "b", "c")) == 0.0
    assert server.run(100, costs(2.0, 1), requests=("a",)) > 0.0, "with fewer it may pay"
    assert server.run(4000, costs(2.0, 4), requests=("a", "b", "c")) > 0.8


def test_who_loses_again_and_again_is_tried_ever_more_seldom() -> None:
    server = Server()
    server.run(4000, costs(2.0, 1))
    before = server.now
    assert server.run(4000, costs(2.0, 1)) < 0.005
    assert server.now - before < 1.005 * 4000


LOW, HIGH = (ExitPolicy.confidence(threshold, mode="defer") for threshold in (0.4, 0.95))


def test_what_pays_with_one_threshold_may_not_with_another() -> None:
    """The same number of requests, of two policies in turn, and of both at a time."""
    server, gains, loses = Server(), costs(2.0, 4), costs(2.0, 1)
    for names in (("a",), ("b",)):
        server.run(300, loses, names, (HIGH,))
        server.run(300, gains, names, (LOW,))
    assert server.run(100, gains, ("c",), (LOW,)) > 0.9
    assert server.run(100, loses, ("d",), (HIGH,)) < 0.1
    both = ("a", "b")
    server.run(500, loses, both, (LOW, HIGH))
    swapped = server.run(100, loses, both, (HIGH, ExitPolicy.confidence(0.5, mode="defer")))
    assert swapped < 0.1, "a mixture of the same modes"


def test_the_kinds_that_are_remembered_are_bounded() -> None:
    server = Server()
    for number in range(2 * KINDS):
        server.run(2, costs(2.0, 1), ("a",), (ExitPolicy.confidence(number / (2 * KINDS)),))
    assert len(server.paying._contests) == KINDS
