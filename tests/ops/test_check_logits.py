"""The exit check of logits that are written already: what the oracle and a CPU's engine run."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exitserve_kernels.exit_check import (
    CRITERIA,
    Criterion,
    HostReading,
    check_logits,
    finish,
    summarise_logits,
)
from exitserve_kernels.exit_check.reference import read

LOGITS = st.lists(st.floats(-60, 60, width=32), min_size=4, max_size=40)
ZERO = torch.zeros(1)


@given(LOGITS, st.sampled_from(CRITERIA))
def test_confidence_is_that_of_the_probabilities(row: list[float], criterion: Criterion) -> None:
    logits = torch.tensor([row])
    found = check_logits(logits, ZERO, criterion=criterion)
    chances = logits.double().softmax(dim=-1)
    best, second = chances.topk(2).values[0].tolist()
    entropy = -float(torch.special.xlogy(chances, chances).sum())
    truth = {"max_prob": best, "margin": best - second, "entropy": 1 - entropy / math.log(len(row))}
    # Sums of exponentials of differences up to 120 carry about 120 * 2^-24 in float32; the
    # entropy and the margin are differences of such numbers.
    tolerance = {"rel": 1e-5, "abs": 0.0 if criterion == "max_prob" else 2e-6}
    assert found.confidence.item() == pytest.approx(truth[criterion], **tolerance)
    assert torch.equal(logits, torch.tensor([row])), "the logits still go to the sampler"


@given(LOGITS, st.integers(1, 3), st.integers(0, 3), st.sampled_from(CRITERIA))
def test_slices_of_the_vocabulary_come_to_the_whole(
    row: list[float], cut: int, eos: int, criterion: Criterion
) -> None:
    """What tensor parallelism does with each rank's share of the head."""
    logits, half = torch.tensor([row]), torch.tensor([0.5])
    parts = []
    for start, part in ((0, logits[:, :cut]), (cut, logits[:, cut:])):
        columns = torch.tensor([eos]) - start
        columns = columns[(columns >= 0) & (columns < part.shape[1])]
        parts.append(summarise_logits(part, criterion=criterion, end_tokens=columns))
    joined = finish(
        torch.stack(parts, dim=1),
        half,
        criterion=criterion,
        vocab_size=len(row),
        end_thresholds=half,
    )
    whole = check_logits(
        logits, half, criterion=criterion, end_tokens=torch.tensor([eos]), end_thresholds=half
    )
    torch.testing.assert_close(joined.confidence, whole.confidence, rtol=1e-5, atol=2e-6)


@given(LOGITS, st.integers(0, 3))
def test_an_end_of_sequence_in_first_place_uses_the_other_threshold(
    row: list[float], eos: int
) -> None:
    found = check_logits(
        torch.tensor([row]),
        torch.tensor([-1.0]),
        end_tokens=torch.tensor([eos]),
        end_thresholds=torch.tensor([math.inf]),
    )
    # By chances: those of logits that hardly differ may be the same number.
    chances = torch.tensor(row).softmax(dim=-1)
    assert found.exits.tolist() == [bool(chances[eos] < chances.max())]


@given(st.lists(LOGITS, min_size=1, max_size=3), st.integers(0, 3), st.sampled_from([1, 70]))
def test_of_the_margin_too(rows: list[list[float]], eos: int, copies: int) -> None:
    """Few rows go another way than many. Ties have no margin, so they never exit."""
    width = min(map(len, rows))
    logits = torch.tensor([row[:width] for row in rows] * copies)
    found = check_logits(
        logits,
        torch.zeros(len(logits)),
        criterion="margin",
        end_tokens=torch.tensor([eos]),
        end_thresholds=torch.full((len(logits),), math.inf),
    )
    chances = logits.softmax(dim=-1)
    best, second = chances.topk(2).values.unbind(dim=-1)
    assert torch.equal(found.confidence, best - second)
    assert torch.equal(found.exits, (best > second) & (chances[:, eos] < best))


@given(st.lists(LOGITS, min_size=1, max_size=3), st.sampled_from(CRITERIA))
def test_a_host_reads_the_same(rows: list[list[float]], criterion: Criterion) -> None:
    width = min(map(len, rows))
    logits = torch.tensor([row[:width] for row in rows])
    found = HostReading.of(read(logits, criterion))
    whole = check_logits(logits, torch.zeros(len(rows)), criterion=criterion)
    # Both are float32, computed in another order.
    assert found.confidence == pytest.approx(whole.confidence.tolist(), abs=1e-6)
    chances = logits.softmax(dim=-1)
    best = [row[token] for row, token in zip(chances.tolist(), found.tokens, strict=True)]
    assert best == chances.amax(dim=-1).tolist()


@pytest.mark.parametrize("criterion", CRITERIA)
def test_a_host_reads_what_cannot_be_read(criterion: Criterion) -> None:
    found = HostReading.of(read(torch.tensor([[torch.nan, 1.0], [torch.inf, 0.0]]), criterion))
    assert all(math.isnan(one) for one in found.confidence)
    assert HostReading.of(read(torch.ones(1, 1), criterion)) == ([0], [1.0])
    assert HostReading.of(read(torch.zeros(0, 5), criterion)) == ([], [])


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("ends", [[], [1]])
def test_nan_never_exits(ends: list[int], criterion: Criterion) -> None:
    logits = torch.tensor([[torch.nan, 1.0], [5.0, torch.nan], [torch.inf, 0.0]])
    low = torch.full((3,), -1.0)
    found = check_logits(
        logits, low, criterion=criterion, end_tokens=torch.tensor(ends).long(), end_thresholds=low
    )
    assert found.confidence.isnan().all()
    assert not found.exits.any()


def test_unknown_criterion() -> None:
    with pytest.raises(ValueError, match="criterion 'best' is unknown; allowed: max_prob, margin"):
        check_logits(torch.zeros(1, 2), ZERO, criterion="best")  # type: ignore[arg-type]
