"""Contrastive weight tying and the balanced cross-entropy against their definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exitserve.errors import ExitServeError
from exitserve_training.losses.headless import balanced_cross_entropy, contrastive_weight_tying

# Both sides are float32 and differ in summation order only: inner products over at most 8
# features, sums over at most 40 positions, a few rounding errors of 1.2e-7 relative each.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


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


def gradients_equal(mine: Tensor, truth: Tensor, leaves: list[Tensor]) -> None:
    ours = torch.autograd.grad(mine * -2.5, leaves)
    theirs = torch.autograd.grad(truth * -2.5, leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


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


def test_cwt_of_sequences_is_that_of_their_tokens() -> None:
    outputs, embeddings, ids = positions(12)
    mask = torch.arange(12) % 4 != 1
    flat = contrastive_weight_tying(outputs, embeddings, target_ids=ids, mask=mask)
    shaped = {"target_ids": ids.view(3, 4), "mask": mask.view(3, 4)}
    stacked = [outputs.view(3, 4, 6), embeddings.view(3, 4, 6)]
    assert torch.equal(contrastive_weight_tying(*stacked, **shaped), flat)
    each = contrastive_weight_tying(*stacked, **shaped, reduction="none")
    assert each.shape == (3, 4)


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


@settings(deadline=None, max_examples=25)
@given(count=st.integers(1, 20), seed=st.integers(0, 50))
def test_balanced_mask_and_ignored_labels_drop_examples(count: int, seed: int) -> None:
    logits, labels = examples(count, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(count, generator=generator) < 0.6
    mask[0] = True
    dropped = balanced_cross_entropy(logits[mask], labels[mask])
    masked = balanced_cross_entropy(logits, labels, mask=mask)
    ignored = balanced_cross_entropy(logits, labels.masked_fill(~mask, -100))
    torch.testing.assert_close(masked, dropped, **CLOSE)
    torch.testing.assert_close(ignored, dropped, **CLOSE)
    gradients_equal(masked, dropped, [logits])
    each = balanced_cross_entropy(logits, labels, mask=mask, reduction="none")
    assert bool((each[~mask] == 0.0).all())
    torch.testing.assert_close(each[mask].mean(), masked, **CLOSE)
    order = torch.randperm(count, generator=generator)
    moved = balanced_cross_entropy(logits[order], labels[order], mask=mask[order], reduction="none")
    torch.testing.assert_close(moved, each[order], **CLOSE)


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
