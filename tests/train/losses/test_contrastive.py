"""SimReg's baselines against the loops of their reference, by hand, and in degenerate cases."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from exitserve.errors import ExitServeError
from exitserve_training.losses import contrastive
from exitserve_training.losses import pairs as shared
from exitserve_training.losses.contrastive import cpretrain, creg, sce, simcse
from exitserve_training.losses.reference import similarity as reference

# Cosines are off by a few float32 rounding errors (1.2e-7 each), 20 times that over the
# smallest temperature, 0.05; gradients have a factor 1 / temperature besides.
# In float64 the same is far below CLOSE_DOUBLE.
CLOSE = {"rtol": 2e-5, "atol": 1e-5}
CLOSE_GRADIENT = {"rtol": 2e-4, "atol": 1e-4}
CLOSE_DOUBLE = {"rtol": 1e-9, "atol": 1e-10}

Loss = Callable[..., Tensor]

CASES: list[tuple[Loss, Loss, dict[str, Any]]] = [
    (simcse, reference.simcse, {}),
    (simcse, reference.simcse, {"level": "token"}),
    (cpretrain, reference.cpretrain, {}),
    (creg, reference.creg, {}),
    (creg, reference.creg, {"temperature": 0.5}),
    (sce, reference.sce, {}),
    (sce, reference.sce, {"contrast": 0.1, "target_temperature": 0.5}),
]
NAMES = [f"{ours.__name__} {options}" for ours, _, options in CASES]
TWO_VIEWS = [case for case in CASES if case[0] in (simcse, sce)]


def problem(
    rows: int = 3,
    tokens: int = 8,
    width: int = 6,
    vocab: int = 3,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(rows, tokens, width, generator=generator, dtype=dtype)
    embeddings += 0.5 * torch.randn(width, generator=generator, dtype=dtype)
    labels = torch.randint(vocab, (rows, tokens), generator=generator)
    return embeddings.requires_grad_(), labels


def gradient(loss: Tensor, embeddings: Tensor, upstream: float = 1.0) -> Tensor:
    return torch.autograd.grad(loss * upstream, embeddings)[0]


@pytest.mark.parametrize("upstream", [1.0, -2.5])
@pytest.mark.parametrize(("ours", "theirs", "options"), CASES, ids=NAMES)
def test_value_and_gradient_equal_the_reference(
    ours: Loss, theirs: Loss, options: dict[str, Any], upstream: float
) -> None:
    embeddings, labels = problem()
    labels[0, 2] = labels[1, 7] = -100
    mask = torch.ones_like(labels, dtype=torch.bool)
    mask[1, 3] = False
    loss = ours(embeddings, labels, mask=mask, **options)
    expected = theirs(embeddings, labels, mask=mask, **options)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected, **CLOSE)
    torch.testing.assert_close(
        gradient(loss, embeddings, upstream),
        gradient(expected, embeddings, upstream),
        **CLOSE_GRADIENT,
    )


@settings(deadline=None, max_examples=60)
@given(
    case=st.sampled_from(CASES),
    rows=st.integers(1, 3),
    tokens=st.integers(1, 7),
    vocab=st.integers(1, 8),
    rows_at_once=st.integers(1, 7),
    seed=st.integers(0, 2**16),
)
def test_any_shape_mask_and_block_of_rows_in_float64(
    case: tuple[Loss, Loss, dict[str, Any]],
    rows: int,
    tokens: int,
    vocab: int,
    rows_at_once: int,
    seed: int,
) -> None:
    ours, theirs, options = case
    embeddings, labels = problem(rows, tokens, 4, vocab, seed, torch.float64)
    mask = torch.rand(rows, tokens, generator=torch.Generator().manual_seed(seed)) < 0.7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "ROWS", rows_at_once)
        by_mask = ours(embeddings, labels, mask=mask, **options)
        by_label = ours(embeddings, labels.masked_fill(~mask, -100), **options)
    expected = theirs(embeddings, labels, mask=mask, **options)
    assert by_mask.dtype == torch.float64
    torch.testing.assert_close(by_mask, expected, **CLOSE_DOUBLE)
    assert torch.equal(by_mask, by_label)
    torch.testing.assert_close(
        gradient(by_mask, embeddings), gradient(expected, embeddings), **CLOSE_DOUBLE
    )


@settings(deadline=None, max_examples=40)
@given(case=st.sampled_from(CASES), seed=st.integers(0, 2**16))
def test_order_and_length_of_vectors_do_not_matter(
    case: tuple[Loss, Loss, dict[str, Any]], seed: int
) -> None:
    ours, _, options = case
    if ours is cpretrain:
        return  # Its pairs are neighbours, so order matters.
    embeddings, labels = problem(seed=seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    # The mean of a sequence keeps its direction only if its vectors keep their ratio.
    lengths = torch.rand(3, 1, 1, generator=generator) * 10 + 0.1
    order = torch.randperm(8, generator=generator)
    moved = ours((embeddings * lengths)[:, order], labels[:, order], **options)
    torch.testing.assert_close(moved, ours(embeddings, labels, **options), **CLOSE_DOUBLE)


@pytest.mark.parametrize(("ours", "theirs", "options"), CASES, ids=NAMES)
def test_masked_tokens_might_as_well_not_be_there(
    ours: Loss, theirs: Loss, options: dict[str, Any]
) -> None:
    embeddings, labels = problem(2, 9, dtype=torch.float64)
    mask = torch.tensor([[True, False, True, True, False, True, True, True, False]] * 2)
    poisoned = embeddings.detach().masked_fill(~mask[..., None], math.nan).requires_grad_()
    loss = ours(poisoned, labels, mask=mask, **options)
    kept = ours(embeddings[:, mask[0]], labels[:, mask[0]], **options)
    torch.testing.assert_close(loss, kept, **CLOSE_DOUBLE)
    grad = gradient(loss, poisoned)
    torch.testing.assert_close(grad[mask], gradient(kept, embeddings)[mask], **CLOSE_DOUBLE)
    assert bool((grad[~mask] == 0).all())


@pytest.mark.parametrize(
    ("ours", "options"),
    [(ours, options) for ours, _, options in CASES if ours is not sce],
    ids=[name for name in NAMES if not name.startswith("sce")],
)
def test_gradcheck(ours: Loss, options: dict[str, Any]) -> None:
    embeddings, labels = problem(2, 4, 3, vocab=2, dtype=torch.float64)
    for reduction in ("mean", "none"):
        assert torch.autograd.gradcheck(
            lambda e, reduction=reduction: ours(e, labels, reduction=reduction, **options),
            (embeddings,),
        )


@pytest.mark.parametrize(("ours", "theirs", "options"), TWO_VIEWS)
def test_second_view(ours: Loss, theirs: Loss, options: dict[str, Any]) -> None:
    embeddings, labels = problem(dtype=torch.float64)
    views = problem(seed=1, dtype=torch.float64)[0]
    loss = ours(embeddings, labels, views=views, **options)
    expected = theirs(embeddings, labels, views=views, **options)
    torch.testing.assert_close(loss, expected, **CLOSE_DOUBLE)
    both = torch.autograd.grad(loss, [embeddings, views], allow_unused=True)
    wanted = torch.autograd.grad(expected, [embeddings, views], allow_unused=True)
    torch.testing.assert_close(both[0], wanted[0], **CLOSE_DOUBLE)
    if ours is sce:
        assert both[1] is None, "the target network gets no gradient"
        assert torch.autograd.gradcheck(lambda e: sce(e, labels, views=views), (embeddings,))
    else:
        torch.testing.assert_close(both[1], wanted[1], **CLOSE_DOUBLE)
    with pytest.raises(ExitServeError, match="views have shape"):
        ours(embeddings, labels, views=views[:, 1:], **options)


E = math.e
RIGHT_ANGLES = torch.tensor([[[2.0, 0.0], [0.0, 3.0], [5.0, 0.0]]])
LABELS = torch.tensor([[7, 7, 4]])


def test_simcse_by_hand() -> None:
    # Rows of mean direction x and y: each knows itself with e / (e + 1).
    embeddings = torch.tensor([[[1.0, 1.0], [1.0, -1.0]], [[0.0, 4.0], [0.0, 0.0]]])
    labels = torch.tensor([[1, 2], [3, 4]])
    loss = simcse(embeddings, labels, temperature=1.0)
    assert loss.item() == pytest.approx(math.log((E + 1) / E), rel=1e-5)
    assert simcse(embeddings, labels, temperature=1.0, reduction="none").shape == (2,)
    each = simcse(RIGHT_ANGLES, LABELS, temperature=1.0, level="token", reduction="none")
    expected = [math.log((2 * E + 1) / E), math.log((E + 2) / E), math.log((2 * E + 1) / E)]
    assert each[0].tolist() == pytest.approx(expected, rel=1e-5)


def test_one_sequence_alone_is_known_exactly() -> None:
    embeddings, labels = problem(rows=1)
    assert simcse(embeddings, labels).item() == 0.0


def test_cpretrain_by_hand() -> None:
    # Pairs (1st, 3rd) and (2nd, 4th): scores [[1, 0], [0, 0]] in both directions.
    embeddings = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 0.0]]])
    labels = torch.tensor([[5, 6, 5, 6]])
    each = cpretrain(embeddings, labels, temperature=1.0, reduction="none")
    expected = [math.log((E + 1) / E), math.log(2.0), 0.0, 0.0]
    assert each[0].tolist() == pytest.approx(expected, rel=1e-5)
    loss = cpretrain(embeddings, labels, temperature=1.0)
    assert loss.item() == pytest.approx((expected[0] + expected[1]) / 2, rel=1e-5)


def test_creg_by_hand() -> None:
    # Only the first two have a positive. First: others score 0 and 1; second: 0 and 0.
    each = creg(RIGHT_ANGLES, LABELS, temperature=1.0, reduction="none")
    expected = [math.log(1 + E), math.log(2.0), 0.0]
    assert each[0].tolist() == pytest.approx(expected, rel=1e-5)
    loss = creg(RIGHT_ANGLES, LABELS, temperature=1.0)
    assert loss.item() == pytest.approx((expected[0] + expected[1]) / 2, rel=1e-5)


def test_sce_by_hand() -> None:
    each = sce(RIGHT_ANGLES, LABELS, contrast=0.5, temperature=1.0, reduction="none")
    first, second = math.log(2 * E + 1), math.log(E + 2)
    # Third: itself with 1/2; of the relations the first at target temperature 0.07 has all.
    expected = [
        0.25 * (first - 1) + 0.25 * first + 0.5 * (first - 1),
        0.25 * second + 0.25 * (second - 1) + 0.5 * second,
        first - 1,
    ]
    assert each[0].tolist() == pytest.approx(expected, rel=1e-5)


def test_sce_with_contrast_one_and_distinct_labels_is_simcse_without_target_gradient() -> None:
    embeddings, _ = problem()
    labels = torch.arange(24).reshape(3, 8)
    views = problem(seed=1)[0].detach()
    loss = sce(embeddings, labels, views=views, contrast=1.0, temperature=0.05)
    expected = simcse(embeddings, labels, views=views, level="token")
    torch.testing.assert_close(loss, expected, **CLOSE)


def test_a_batch_as_one_row_compares_across_sequences() -> None:
    embeddings, _ = problem(2, 2)
    labels = torch.tensor([[1, 2], [1, 3]])
    assert creg(embeddings, labels).item() == 0.0
    assert creg(embeddings.reshape(1, 4, -1), labels.reshape(1, 4)).item() > 0.0


def degenerate() -> dict[str, tuple[Tensor, Tensor]]:
    embeddings, labels = problem()
    embeddings = embeddings.detach()
    zero = embeddings.clone()
    zero[:, 2:5] = 0.0
    return {
        "one token": (embeddings[:1, :1], labels[:1, :1]),
        "labels all equal": (embeddings, torch.full_like(labels, 5)),
        "labels all distinct": (embeddings, torch.arange(24).reshape(3, 8)),
        "nothing counted": (embeddings, torch.full_like(labels, -100)),
        "one row not counted": (embeddings, labels.index_fill(0, torch.tensor([1]), -100)),
        "zero vectors": (zero, labels),
        "only zero vectors": (embeddings * 0.0, labels),
        "huge": (embeddings * 1e30, labels),
        "tiny": (embeddings * 1e-9, labels),
        "tinier than any direction": (embeddings * 1e-30, labels),
        "float16": (embeddings.half(), labels),
        "bfloat16": (embeddings.bfloat16(), labels),
    }


@pytest.mark.parametrize("case", list(degenerate()))
@pytest.mark.parametrize(("ours", "theirs", "options"), CASES, ids=NAMES)
def test_degenerate_inputs_are_finite(
    ours: Loss, theirs: Loss, options: dict[str, Any], case: str
) -> None:
    embeddings, labels = degenerate()[case]
    embeddings.requires_grad_()
    loss = ours(embeddings, labels, **options)
    each = ours(embeddings, labels, reduction="none", **options)
    grad = gradient(loss, embeddings)
    assert loss.dtype == each.dtype == torch.float32
    assert math.isfinite(loss.item())
    # A loss of 0 is a difference of equal numbers up to 1 / temperature.
    assert loss.item() >= -1e-5
    assert bool(each.isfinite().all())
    assert bool(grad.isfinite().all())
    empty = case in ("one token", "nothing counted")
    if empty or (case == "labels all distinct" and ours in (cpretrain, creg)):
        assert loss.item() == 0.0
        assert bool((grad == 0).all())
    if case == "only zero vectors":
        assert bool((grad == 0).all())


@pytest.mark.parametrize(("ours", "theirs", "options"), CASES, ids=NAMES)
def test_autocast_changes_nothing(ours: Loss, theirs: Loss, options: dict[str, Any]) -> None:
    embeddings, labels = problem()
    plain = ours(embeddings, labels, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = ours(embeddings, labels, **options)
    assert torch.equal(cast, plain)
    assert torch.equal(gradient(cast, embeddings), gradient(plain, embeddings))


@pytest.mark.parametrize(("ours", "theirs", "options"), CASES[1:], ids=NAMES[1:])
def test_no_block_of_similarities_is_kept(
    ours: Loss, theirs: Loss, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "ROWS", 16)
    shapes: list[torch.Size] = []
    plain = shared.similarities

    def watched(rows: Tensor, columns: Tensor, temperature: float) -> Tensor:
        scores = plain(rows, columns, temperature)
        shapes.append(scores.shape)
        return scores

    monkeypatch.setattr(contrastive, "similarities", watched)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    embeddings, labels = problem(2, 64)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = ours(embeddings, labels, **options)
    assert set(shapes) == {torch.Size([2, 16, 64])}
    assert max(kept) < 2 * 16 * 64
    loss.backward()


@pytest.mark.parametrize(
    ("ours", "change", "message"),
    [
        (simcse, {"level": "tokens"}, "level 'tokens' is unknown.*Did you mean 'token'"),
        (cpretrain, {"temperature": -1.0}, "temperature -1.0 must be"),
        (creg, {"reduction": "sum"}, "reduction 'sum' is unknown; allowed: mean, none"),
        (sce, {"contrast": 1.5}, r"contrast 1.5 must be in 0..1"),
        (sce, {"target_temperature": 0.0}, "target_temperature 0.0 must be"),
        (sce, {"mask": torch.ones(2, 3, dtype=torch.bool)}, "mask has shape"),
    ],
)
def test_bad_arguments_are_named(ours: Loss, change: dict[str, Any], message: str) -> None:
    embeddings, labels = problem()
    with pytest.raises(ExitServeError, match=message):
        ours(embeddings, labels, **change)
