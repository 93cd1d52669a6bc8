"""Contrastive weight tying and the balanced cross-entropy against their definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from exitserve.errors import ExitServeError
from exitserve_training.losses import headless
from exitserve_training.losses.headless import balanced_cross_entropy, contrastive_weight_tying
from exitserve_training.losses.reference import headless as reference

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


@pytest.mark.parametrize("count", [1, 2, 7, 33])
@pytest.mark.parametrize("exclude", [False, True])
def test_cwt_equals_the_reference(count: int, exclude: bool) -> None:
    outputs, embeddings, ids = positions(count)
    mine = contrastive_weight_tying(outputs, embeddings, target_ids=ids if exclude else None)
    truth = reference.contrastive_weight_tying(
        outputs, embeddings, ids.tolist() if exclude else None
    )
    torch.testing.assert_close(mine, truth, **CLOSE)
    gradients_equal(mine, truth, [outputs, embeddings])


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


@settings(deadline=None, max_examples=25)
@given(count=st.integers(1, 20), block=st.integers(1, 25), seed=st.integers(0, 50))
def test_cwt_blocks_change_nothing(count: int, block: int, seed: int) -> None:
    outputs, embeddings, ids = positions(count, seed=seed)
    whole = contrastive_weight_tying(outputs, embeddings, target_ids=ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headless, "BLOCK_ROWS", block)
        parts = contrastive_weight_tying(outputs, embeddings, target_ids=ids)
        torch.testing.assert_close(parts, whole, **CLOSE)
        gradients_equal(parts, whole, [outputs, embeddings])


@settings(deadline=None, max_examples=25)
@given(count=st.integers(1, 20), scale=st.floats(0.1, 10.0), seed=st.integers(0, 50))
def test_cwt_knows_neither_the_order_nor_a_scale_moved_between_its_arguments(
    count: int, scale: float, seed: int
) -> None:
    outputs, embeddings, ids = positions(count, seed=seed)
    each = contrastive_weight_tying(outputs, embeddings, target_ids=ids, reduction="none")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    moved = contrastive_weight_tying(
        outputs[order] * scale, embeddings[order] / scale, target_ids=ids[order], reduction="none"
    )
    torch.testing.assert_close(moved, each[order], **CLOSE)


@settings(deadline=None, max_examples=25)
@given(count=st.integers(2, 20), seed=st.integers(0, 50))
def test_cwt_mask_drops_positions_as_rows_and_as_negatives(count: int, seed: int) -> None:
    outputs, embeddings, ids = positions(count, seed=seed)
    mask = torch.rand(count, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[0] = True
    masked = contrastive_weight_tying(outputs, embeddings, target_ids=ids, mask=mask)
    dropped = contrastive_weight_tying(outputs[mask], embeddings[mask], target_ids=ids[mask])
    torch.testing.assert_close(masked, dropped, **CLOSE)
    gradients_equal(masked, dropped, [outputs, embeddings])
    each = contrastive_weight_tying(
        outputs, embeddings, target_ids=ids, mask=mask, reduction="none"
    )
    assert each.shape == (count,)
    assert bool((each[~mask] == 0.0).all())
    torch.testing.assert_close(each[mask].mean(), masked, **CLOSE)


def test_cwt_of_sequences_is_that_of_their_tokens() -> None:
    outputs, embeddings, ids = positions(12)
    mask = torch.arange(12) % 4 != 1
    flat = contrastive_weight_tying(outputs, embeddings, target_ids=ids, mask=mask)
    shaped = {"target_ids": ids.view(3, 4), "mask": mask.view(3, 4)}
    stacked = [outputs.view(3, 4, 6), embeddings.view(3, 4, 6)]
    assert torch.equal(contrastive_weight_tying(*stacked, **shaped), flat)
    each = contrastive_weight_tying(*stacked, **shaped, reduction="none")
    assert each.shape == (3, 4)


def test_cwt_gradients_numerically() -> None:
    outputs, embeddings, ids = positions(5, width=3)
    leaves = [leaf.detach().double().requires_grad_() for leaf in (outputs, embeddings)]

    def loss(o: Tensor, e: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(headless, "BLOCK_ROWS", 2)
            return contrastive_weight_tying(o, e, target_ids=ids)

    assert loss(*leaves).dtype == torch.float64
    assert torch.autograd.gradcheck(loss, leaves)


def test_cwt_under_autocast_is_still_float32() -> None:
    outputs, embeddings, _ = positions(9)
    plain = contrastive_weight_tying(outputs, embeddings)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = contrastive_weight_tying(outputs, embeddings)
    assert torch.equal(inside, plain)


def test_cwt_of_bfloat16_is_float32_of_the_rounded_numbers() -> None:
    outputs, embeddings, _ = positions(9)
    half = [outputs.detach().bfloat16(), embeddings.detach().bfloat16()]
    loss = contrastive_weight_tying(*half)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, contrastive_weight_tying(half[0].float(), half[1].float()))


def test_cwt_keeps_no_scores_for_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory claim: what forward saves grows with N, not with N * N."""
    monkeypatch.setattr(headless, "BLOCK_ROWS", 16)
    outputs, embeddings, _ = positions(64)
    largest = 0

    def seen(tensor: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        contrastive_weight_tying(outputs, embeddings)
    assert largest <= outputs.numel()


DEGENERATE = {
    "zeros": torch.zeros(4, 3),
    "one position": torch.full((1, 3), 0.5),
    "no position": torch.zeros(0, 3),
    "tiny": torch.full((4, 3), 1e-30),
    "huge": torch.tensor([[1e15, -1e15, 1e15]] * 2 + [[-1e15, 1e15, 3e14]]),
}


@pytest.mark.parametrize("name", list(DEGENERATE))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_cwt_is_finite(name: str, dtype: torch.dtype, reduction: str) -> None:
    value = DEGENERATE[name]
    if dtype == torch.float16:
        value = value.clamp(-6e4, 6e4)
    outputs = value.to(dtype).requires_grad_()
    embeddings = value.flip(0).to(dtype).requires_grad_()
    loss = contrastive_weight_tying(outputs, embeddings, reduction=reduction)  # type: ignore[arg-type]
    assert loss.dtype == torch.float32
    assert bool(loss.isfinite().all())
    # A mean's gradient can be twice the largest entry, which float16 would not hold: halved.
    mean = loss.sum() / (2 * max(loss.numel(), 1))
    for grad in torch.autograd.grad(mean, [outputs, embeddings]):
        assert bool(grad.isfinite().all())


def test_cwt_of_nothing_is_zero_with_zero_gradients_whatever_the_states() -> None:
    outputs = torch.tensor([[torch.nan, torch.inf]], requires_grad=True)
    embeddings = torch.tensor([[1e38, 1.0]], requires_grad=True)
    loss = contrastive_weight_tying(outputs, embeddings, mask=torch.tensor([False]))
    assert loss.item() == 0.0
    for grad in torch.autograd.grad(loss, [outputs, embeddings]):
        assert bool((grad == 0.0).all())


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


@pytest.mark.parametrize("count", [1, 2, 9, 40])
def test_balanced_equals_the_reference_and_weighted_cross_entropy(count: int) -> None:
    logits, labels = examples(count)
    mine = balanced_cross_entropy(logits, labels)
    truth = reference.balanced_cross_entropy(logits, labels.tolist())
    torch.testing.assert_close(mine, truth, **CLOSE)
    gradients_equal(mine, truth, [logits])
    counts = torch.bincount(labels, minlength=4).float()
    weight = torch.where(counts > 0, 1.0 / counts, 0.0)
    torch.testing.assert_close(mine, functional.cross_entropy(logits, labels, weight), **CLOSE)


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
@given(count=st.integers(1, 12), copies=st.integers(2, 5), seed=st.integers(0, 50))
def test_balanced_does_not_see_how_often_a_class_occurs(count: int, copies: int, seed: int) -> None:
    logits, labels = examples(count, seed=seed)
    chosen = labels == labels[0]
    more_logits = torch.cat([logits, *[logits[chosen]] * copies])
    more_labels = torch.cat([labels, *[labels[chosen]] * copies])
    once = balanced_cross_entropy(logits, labels)
    often = balanced_cross_entropy(more_logits, more_labels)
    torch.testing.assert_close(often, once, **CLOSE)
    gradients_equal(often, once, [logits])


@settings(deadline=None, max_examples=25)
@given(per_class=st.integers(1, 5), seed=st.integers(0, 50), scale=st.floats(0.01, 100.0))
def test_balanced_classes_give_plain_cross_entropy(per_class: int, seed: int, scale: float) -> None:
    logits, _ = examples(4 * per_class, seed=seed)
    labels = torch.arange(4).repeat(per_class)
    plain = functional.cross_entropy(logits, labels)
    torch.testing.assert_close(balanced_cross_entropy(logits, labels), plain, **CLOSE)
    even = balanced_cross_entropy(logits, labels, frequencies=torch.full((4,), scale))
    torch.testing.assert_close(even, plain, **CLOSE)


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


def test_balanced_of_any_shape() -> None:
    logits, labels = examples(12)
    flat = balanced_cross_entropy(logits, labels, reduction="none")
    shaped = balanced_cross_entropy(logits.view(3, 4, 4), labels.view(3, 4), reduction="none")
    assert torch.equal(shaped, flat.view(3, 4))


def test_balanced_gradients_numerically() -> None:
    logits, labels = examples(6)
    wide = logits.detach().double().requires_grad_()
    assert balanced_cross_entropy(wide, labels).dtype == torch.float64
    assert torch.autograd.gradcheck(lambda x: balanced_cross_entropy(x, labels), wide)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0.0, 1e-30, 6e4])
@pytest.mark.parametrize("labels", [[0, 0, 0], [0, 1, 2], [2, -100, 1], [-100, -100, -100]])
def test_balanced_is_finite(
    labels: list[int], size: float, dtype: torch.dtype, reduction: str
) -> None:
    logits = (size * torch.tensor([[1.0, -1.0, 0.5]] * 3)).to(dtype).requires_grad_()
    loss = balanced_cross_entropy(logits, torch.tensor(labels), reduction=reduction)  # type: ignore[arg-type]
    assert loss.dtype == torch.float32
    assert bool(loss.isfinite().all())
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert bool(grad.isfinite().all())
    if max(labels) < 0:
        assert loss.sum().item() == 0.0
        assert bool((grad == 0.0).all())


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
