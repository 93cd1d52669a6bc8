"""Contrastive weight tying and the balanced cross-entropy against their definitions."""

import math

import pytest
import torch
from torch import Tensor

from exitserve.errors import ExitServeError
from exitserve_training.losses.headless import balanced_cross_entropy, contrastive_weight_tying


def positions(count: int, width: int = 6, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, embeddings of their targets, and the targets' tokens, some of them repeated."""
    generator = torch.Generator().manual_seed(seed * 100 + count)
    table = torch.randn(5, width, generator=generator)
    ids = torch.randint(5, (count,), generator=generator)
    outputs = torch.randn(count, width, generator=generator)
    return outputs.requires_grad_(), table[ids].requires_grad_(), ids


def examples(count: int, classes: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed * 100 + count)
    logits = 2.0 * torch.randn(count, classes, generator=generator)
    return logits.requires_grad_(), torch.randint(classes, (count,), generator=generator)


# --- contrastive weight tying -------------------------------------------------------------


def test_cwt_of_orthogonal_targets_by_hand() -> None:
    """Scores are 4 for the own target, 0 for the other: -log(e^4 / (e^4 + 1))."""
    states = 2.0 * torch.eye(2)
    loss = contrastive_weight_tying(states, states)
    # The difference of two numbers near 4, each rounded to 2.4e-7.
    assert loss.item() == pytest.approx(math.log1p(math.exp(-4.0)), abs=5e-7)


def test_cwt_repeats_are_negatives_unless_their_tokens_are_given() -> None:
    outputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    same = torch.ones(6, 4)
    loss = contrastive_weight_tying(outputs, same)
    assert loss.item() == pytest.approx(math.log(6), rel=1e-6)
    without = contrastive_weight_tying(outputs, same, target_ids=torch.zeros(6, dtype=torch.long))
    assert without.item() == 0.0
    for value in (loss, without):
        (grad,) = torch.autograd.grad(value, outputs)
        torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0.0, atol=1e-7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_embeddings": torch.zeros(4, 6)}, "expected the same"),
        ({"target_ids": torch.zeros(4, dtype=torch.long)}, r"target_ids has shape \(4,\)"),
        ({"mask": torch.ones(4, dtype=torch.bool)}, r"mask has shape \(4,\); expected \(5,\)"),
        ({"reduction": "men"}, "Did you mean 'mean'"),
    ],
)
def test_cwt_bad_arguments_are_named(change: dict[str, object], message: str) -> None:
    outputs, embeddings, _ = positions(5)
    arguments = {"outputs": outputs, "target_embeddings": embeddings, **change}
    with pytest.raises(ExitServeError, match=message):
        contrastive_weight_tying(**arguments)  # type: ignore[arg-type]


# --- balanced cross-entropy ---------------------------------------------------------------


def test_balanced_by_hand() -> None:
    """Class 0 costs log 2 three times, class 1 costs log 4 once: (log 2 + log 4) / 2."""
    third = math.log(1.0 / 3.0)
    logits = torch.tensor([[0.0, 0.0]] * 3 + [[0.0, third]])
    labels = torch.tensor([0, 0, 0, 1])
    expected = (math.log(2.0) + math.log(4.0)) / 2
    assert balanced_cross_entropy(logits, labels).item() == pytest.approx(expected, rel=1e-6)
    # With the data set's frequencies 1 : 3 the weights are 1, 1, 1 and 1/3.
    known = balanced_cross_entropy(logits, labels, frequencies=torch.tensor([1, 3]))
    expected = (3 * math.log(2.0) + math.log(4.0) / 3) / (3 + 1 / 3)
    assert known.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.tensor([0, 1])}, r"labels has shape \(2,\); expected \(3,\)"),
        ({"labels": torch.tensor([0, 4, 1])}, "label 4 is not a class: the logits have 4"),
        ({"labels": torch.tensor([0, -1, 1])}, "label -1 is not a class"),
        ({"mask": torch.ones(2, dtype=torch.bool)}, "mask has shape"),
        ({"frequencies": torch.ones(3)}, r"frequencies have shape \(3,\)"),
        ({"frequencies": torch.tensor([1.0, 0.0, 1.0, 1.0])}, r"classes \[1\] occur"),
        ({"reduction": "sum"}, "allowed: mean, none"),
    ],
)
def test_balanced_bad_arguments_are_named(change: dict[str, object], message: str) -> None:
    logits, _ = examples(3)
    arguments = {"logits": logits, "labels": torch.tensor([0, 1, 1]), **change}
    with pytest.raises(ExitServeError, match=message):
        balanced_cross_entropy(**arguments)  # type: ignore[arg-type]
