"""Contrastive weight tying and the balanced cross-entropy against their definitions."""

import math

import pytest
import torch

from exitserve_training.losses.headless import balanced_cross_entropy, contrastive_weight_tying


def test_cwt_of_orthogonal_targets_by_hand() -> None:
    """Scores are 4 for the own target, 0 for the other: -log(e^4 / (e^4 + 1))."""
    states = 2.0 * torch.eye(2)
    loss = contrastive_weight_tying(states, states)
    # The difference of two numbers near 4, each rounded to 2.4e-7.
    assert loss.item() == pytest.approx(math.log1p(math.exp(-4.0)), abs=5e-7)


def test_balanced_by_hand() -> None:
    """Class 0 costs log 2 three times, class 1 costs log 4 once: (log 2 + log 4) / 2."""
    third = math.log(1.0 / 3.0)
    logits = torch.tensor([[0.0, 0.0]] * 3 + [[0.0, third]])
    labels = torch.tensor([0, 0, 0, 1])
    expected = (math.log(2.0) + math.log(4.0)) / 2
    assert balanced_cross_entropy(logits, labels).item() == pytest.approx(expected, rel=1e-6)
