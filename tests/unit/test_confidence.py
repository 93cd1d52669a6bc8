"""The exit check's arithmetic."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from exitserve.confidence import exit_mask, max_prob

NO_EOS = torch.empty(0, dtype=torch.long)


@given(st.lists(st.floats(-60, 60), min_size=2, max_size=40))
def test_confidence_is_the_largest_softmax_probability(row: list[float]) -> None:
    logits = torch.tensor([row])
    token, confidence = max_prob(logits)
    probabilities = logits.double().softmax(dim=-1)
    assert probabilities[0, token[0]] == probabilities.max()
    # float32 logsumexp of values up to 60 carries a relative error of about 60 * 2^-24.
    torch.testing.assert_close(confidence.double(), probabilities.amax(1), rtol=1e-5, atol=0)


def test_masked_words_do_not_spoil_the_confidence() -> None:
    _, confidence = max_prob(torch.tensor([[0.0, -torch.inf, -torch.inf]]))
    assert confidence.item() == 1.0


def test_nan_never_exits() -> None:
    token, confidence = max_prob(torch.tensor([[torch.nan, 1.0], [5.0, torch.nan]]))
    low = torch.full((2,), 0.01)
    assert not exit_mask(token, confidence, low, low, NO_EOS).any()


def test_confidence_must_exceed_its_own_threshold() -> None:
    token, confidence = torch.tensor([4, 4, 4]), torch.tensor([0.5, 0.5, 0.5])
    thresholds = torch.tensor([0.4, 0.5, 0.6])
    assert exit_mask(token, confidence, thresholds, thresholds, NO_EOS).tolist() == [
        True,
        False,
        False,
    ]


def test_end_of_sequence_uses_the_other_threshold() -> None:
    token, confidence = torch.tensor([1, 2]), torch.tensor([0.8, 0.8])
    mask = exit_mask(
        token, confidence, torch.full((2,), 0.5), torch.full((2,), 0.9), torch.tensor([1])
    )
    assert mask.tolist() == [False, True]
