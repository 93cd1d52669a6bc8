"""The exit check's arithmetic."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exitserve.confidence import exit_mask, join_slices, max_prob, slice_summary

NO_EOS = torch.empty(0, dtype=torch.long)
LOGITS = st.lists(st.floats(-60, 60, width=32), min_size=4, max_size=40)


@given(LOGITS)
def test_confidence_is_the_largest_softmax_probability(row: list[float]) -> None:
    logits = torch.tensor([row])
    confidence, _ = max_prob(logits, NO_EOS)
    probabilities = logits.double().softmax(dim=-1)
    # float32 sums of exponentials of differences up to 120 carry about 120 * 2^-24.
    torch.testing.assert_close(confidence.double(), probabilities.amax(1), rtol=1e-5, atol=0)
    assert torch.equal(logits, torch.tensor([row])), "the logits still go to the sampler"


@given(LOGITS, st.integers(0, 3))
def test_an_end_of_sequence_in_first_place_is_told(row: list[float], eos: int) -> None:
    _, ends = max_prob(torch.tensor([row]), torch.tensor([eos]))
    assert ends.tolist() == [max(row) == row[eos]]


@given(LOGITS, st.integers(1, 3), st.integers(0, 3))
def test_slices_of_the_vocabulary_come_to_the_whole(row: list[float], cut: int, eos: int) -> None:
    """What tensor parallelism does with each rank's share of the head."""
    logits = torch.tensor([row])
    parts = []
    for start, part in ((0, logits[:, :cut]), (cut, logits[:, cut:])):
        columns = torch.tensor([eos]) - start
        columns = columns[(columns >= 0) & (columns < part.shape[1])]
        parts.append(slice_summary(part, columns))
    confidence, ends = join_slices(torch.stack(parts, dim=1))
    whole, whole_ends = max_prob(logits, torch.tensor([eos]))
    torch.testing.assert_close(confidence, whole, rtol=1e-5, atol=0)
    assert torch.equal(ends, whole_ends)


def test_masked_words_do_not_spoil_the_confidence() -> None:
    confidence, _ = max_prob(torch.tensor([[0.0, -torch.inf, -torch.inf]]), NO_EOS)
    assert confidence.item() == 1.0


@pytest.mark.parametrize("eos", [NO_EOS, torch.tensor([1])])
def test_nan_never_exits(eos: torch.Tensor) -> None:
    logits = torch.tensor([[torch.nan, 1.0], [5.0, torch.nan], [torch.inf, 0.0]])
    low = torch.full((3,), 0.01)
    assert not exit_mask(*max_prob(logits, eos), low, low).any()


def test_confidence_must_exceed_its_own_threshold() -> None:
    confidence, ends = torch.tensor([0.5, 0.5, 0.5]), torch.zeros(3, dtype=torch.bool)
    thresholds = torch.tensor([0.4, 0.5, 0.6])
    assert exit_mask(confidence, ends, thresholds, thresholds).tolist() == [True, False, False]


def test_end_of_sequence_uses_the_other_threshold() -> None:
    confidence, ends = torch.tensor([0.8, 0.8]), torch.tensor([True, False])
    mask = exit_mask(confidence, ends, torch.full((2,), 0.5), torch.full((2,), 0.9))
    assert mask.tolist() == [False, True]
