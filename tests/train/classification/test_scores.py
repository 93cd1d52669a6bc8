"""GLUE's scores, by their definitions."""

import math

import pytest
import torch

from exitserve_training.classification.evaluation import scores


def test_two_classes_by_hand() -> None:
    known = torch.tensor([1, 1, 1, 0, 0, 0, 0, 0])
    predicted = torch.tensor([1, 1, 0, 1, 0, 0, 0, 0])
    # 2 true positives, 1 false one, 1 false negative, 4 true negatives.
    found = scores(predicted, known, 2)
    assert found["accuracy"] == pytest.approx(6 / 8)
    assert found["f1"] == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert found["matthews"] == pytest.approx((2 * 4 - 1 * 1) / math.sqrt(3 * 3 * 5 * 5))


@pytest.mark.parametrize("num_classes", [2, 5])
def test_matthews_is_the_correlation_of_one_hot_vectors(num_classes: int) -> None:
    """R_K: the covariance summed over classes, by the root of the variances'."""
    generator = torch.Generator().manual_seed(num_classes)
    known = torch.randint(num_classes, (200,), generator=generator)
    predicted = known.where(torch.rand(200, generator=generator) < 0.6, known.flip(0))
    a, b = (torch.nn.functional.one_hot(x, num_classes).double() for x in (known, predicted))
    a, b = a - a.mean(0), b - b.mean(0)
    expected = (a * b).sum() / (a.square().sum() * b.square().sum()).sqrt()
    found = scores(predicted, known, num_classes)
    assert found["matthews"] == pytest.approx(expected.item())
    assert (found["f1"] is None) == (num_classes > 2)
