"""The whole choice, simulated: order, start, test, sources, lengths, ends of sequence."""

import math
import random

import pytest

from exitserve.calibration.choice import (
    Choice,
    PromiseTest,
    Target,
    mean_risk,
    passing_choices,
    weighted_loss,
)
from exitserve.calibration.outcomes import Outcome, Source
from exitserve.calibration.proposals import Proposal

DELTA, RUNS = 0.1, 300
TARGET = Target(0.9)
MOST = 100
RISKS = (0.03, 0.06, 0.085, 0.101, 0.13, 0.2)
"""True risks of the candidates, over tokens; the last three are above the limit of 0.1."""


def outcome(
    wrong: float, tokens: int = MOST, source: Source = "text", ends: int = 0, wrong_ends: int = 0
) -> Outcome:
    return Outcome(
        source=source,
        tokens=tokens,
        agreement=1.0 - wrong,
        depth=9.0,
        checks=1.0,
        stays=0.5,
        nats=2.0 + wrong,
        full_nats=2.0,
        ends=ends,
        wrong_ends=wrong_ends,
    )


def candidate(number: int, selected: list[Outcome], ends: float = 1.0) -> Choice:
    return Choice(Proposal("max_prob", ((6, 0.5),), float(number)), {6: ends}, tuple(selected))


def drawn(risk: float, draw: random.Random, source: Source) -> Outcome:
    """A piece whose tokens are wrong with `risk`; long ones more often than short ones."""
    short = draw.random() < 0.6
    share = risk * (0.3 if short else 1.0675)  # weighed by tokens: risk
    tokens = 10 if short else MOST
    wrong = sum(draw.random() < share for _ in range(tokens))
    return outcome(wrong / tokens, tokens, source)


def calibration(draw: random.Random, pieces: int = 300) -> float | None:
    """The true risk of what is chosen among all; None where nothing is."""
    sources: list[Source] = ["text", "generated"] * (pieces // 2)
    candidates = [
        candidate(number, [drawn(risk, draw, source) for source in sources[:80]])
        for number, risk in enumerate(RISKS)
    ]
    risks = {one.proposal: risk for one, risk in zip(candidates, RISKS, strict=True)}

    def run(one: Choice, piece: int) -> Outcome:
        return drawn(risks[one.proposal], draw, sources[piece])

    found = passing_choices(
        candidates, TARGET, PromiseTest(run, sources, DELTA, MOST), lambda: None
    )
    return max((risks[one.proposal] for one in found), default=None)


def test_the_target_is_missed_no_more_often_than_the_level_allows() -> None:
    draw = random.Random(0)
    found = [calibration(draw) for _ in range(RUNS)]
    wrong = sum(risk is not None and risk > TARGET.limit for risk in found) / RUNS
    # Two sources must both be fooled, so it is rarer than delta; three deviations of chance.
    assert wrong <= DELTA + 3 * math.sqrt(DELTA * (1 - DELTA) / RUNS)
    assert sum(risk is not None for risk in found) > 0.9 * RUNS, "and something is promised"


def test_a_loosened_test_would_be_caught(monkeypatch) -> None:
    """With the means alone the same simulation misses the target far more often."""

    def mean(trial: PromiseTest, one: Choice, target) -> float:
        pieces = [trial.outcome(one, piece) for piece in range(len(trial.sources))]
        return float(mean_risk(pieces, target) > target.limit)

    monkeypatch.setattr(PromiseTest, "p_value", mean)
    draw = random.Random(0)
    found = [calibration(draw) for _ in range(RUNS)]
    wrong = sum(risk is not None and risk > TARGET.limit for risk in found) / RUNS
    assert wrong > DELTA + 3 * math.sqrt(DELTA * (1 - DELTA) / RUNS)


def test_tokens_count_not_pieces() -> None:
    """Short pieces without errors do not make up for long ones with many."""
    pieces = [outcome(0.0, 10)] * 9 + [outcome(0.2, MOST)]
    assert mean_risk(pieces, TARGET) == pytest.approx(20 / 190)
    losses = [weighted_loss(one, TARGET, MOST) for one in pieces]
    assert all(0.0 <= loss <= 1.0 for loss in losses)
    assert sum(losses) / len(losses) > TARGET.limit


def trial(pieces: list[Outcome]) -> PromiseTest:
    return PromiseTest(lambda _, piece: pieces[piece], [one.source for one in pieces], DELTA, MOST)


def test_early_ends_are_tested_over_all_sources() -> None:
    """Running text hardly ever ends; what the model writes does."""
    text = [outcome(0.0) for _ in range(100)]
    written = [outcome(0.0, source="generated", ends=1) for _ in range(100)]
    good = candidate(0, [*text[:50], *written[:50]], ends=0.9)
    assert passing_choices([good], TARGET, trial([*text, *written]), lambda: None) == [good]
    wrong = [outcome(0.0, source="generated", ends=1, wrong_ends=i % 2) for i in range(100)]
    bad = candidate(0, [*text[:50], *wrong[:50]], ends=0.9)
    assert passing_choices([bad], TARGET, trial([*text, *wrong]), lambda: None) == []


def test_one_bad_source_is_enough_to_fail() -> None:
    text = [outcome(0.0) for _ in range(200)]
    written = [outcome(0.2, source="generated") for _ in range(200)]
    one = candidate(0, [*text[:50], *written[:50]])
    pieces = [*text, *written]
    for order in (pieces, pieces[::-1]):
        tried = trial(order)
        assert passing_choices([one], TARGET, tried, lambda: None) == []
        ran = [tried.sources[piece] for _, piece in tried.measured]
        assert set(ran) == {"generated"}, "what the other source says changes nothing"


def test_nothing_is_run_where_nothing_could_be_shown() -> None:
    measured: list[int] = []

    def run(_: Choice, piece: int) -> Outcome:
        measured.append(piece)
        return outcome(0.0)

    few = PromiseTest(run, ["text"] * 10, DELTA, MOST)
    assert passing_choices([candidate(0, [outcome(0.0)] * 5)], TARGET, few, lambda: None) == []
    assert passing_choices([], TARGET, PromiseTest(run, [], DELTA, MOST), lambda: None) == []
    assert measured == []
