"""SimReg against the loops of its reference, by hand, and where its formula degenerates."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from exitserve.errors import ExitServeError
from exitserve_training.losses import pairs
from exitserve_training.losses import similarity as module
from exitserve_training.losses.reference import similarity as reference
from exitserve_training.losses.similarity import simreg, simreg_weight
from exitserve_training.losses.tokens import unit_vectors

# Cosines of either side are off by a few float32 rounding errors (1.2e-7 each), which
# temperature 0.01 makes 100 times larger: up to 5e-5 in L_i, relative in softplus of it.
CLOSE = {"rtol": 2e-4, "atol": 1e-5}
# The gradient has a factor 1 / temperature = 100 besides.
CLOSE_GRADIENT = {"rtol": 1e-3, "atol": 1e-3}
# float64 against float64: rounding errors of 2e-16, 100 times that twice in gradients; and
# softplus, which is taken as the identity above 20, is there off by e^-20 = 2e-9.
CLOSE_DOUBLE = {"rtol": 1e-9, "atol": 1e-8}

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.1},
    {"similarity": "inner", "temperature": 1.0},
    {"grouping": "mean"},
    {"grouping": "label"},
    {"chunk_size": 3},
    {"chunk_size": 3, "chunk_weights": "tokens"},
    {"chunk_size": 4, "grouping": "label"},
    {"chunk_size": 1},
]


def problem(
    rows: int = 2,
    tokens: int = 8,
    width: int = 6,
    vocab: int = 3,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(rows, tokens, width, generator=generator, dtype=dtype)
    # Not only orthogonal-ish vectors: a common part, as trained models have.
    embeddings += 0.5 * torch.randn(width, generator=generator, dtype=dtype)
    labels = torch.randint(vocab, (rows, tokens), generator=generator)
    return embeddings.requires_grad_(), labels


def gradient(loss: Tensor, embeddings: Tensor, upstream: float = 1.0) -> Tensor:
    return torch.autograd.grad(loss * upstream, embeddings)[0]


@pytest.mark.parametrize("upstream", [1.0, -2.5])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_value_and_gradient_equal_the_reference(options: dict[str, Any], upstream: float) -> None:
    embeddings, labels = problem()
    labels[0, 2] = labels[1, 7] = -100
    mask = torch.ones_like(labels, dtype=torch.bool)
    mask[1, 3] = False
    ours = simreg(embeddings, labels, mask=mask, **options)
    expected = reference.simreg(embeddings, labels, mask=mask, **options)
    assert ours.dtype == torch.float32
    assert ours.shape == ()
    torch.testing.assert_close(ours, expected, **CLOSE)
    torch.testing.assert_close(
        gradient(ours, embeddings, upstream),
        gradient(expected, embeddings, upstream),
        **CLOSE_GRADIENT,
    )


@settings(deadline=None, max_examples=40)
@given(
    options=st.sampled_from(OPTIONS),
    rows=st.integers(1, 3),
    tokens=st.integers(1, 7),
    vocab=st.integers(1, 8),
    seed=st.integers(0, 2**16),
)
def test_any_shape_and_mask_in_float64(
    options: dict[str, Any], rows: int, tokens: int, vocab: int, seed: int
) -> None:
    embeddings, labels = problem(rows, tokens, 4, vocab, seed, torch.float64)
    mask = torch.rand(rows, tokens, generator=torch.Generator().manual_seed(seed)) < 0.7
    by_mask = simreg(embeddings, labels, mask=mask, **options)
    by_label = simreg(embeddings, labels.masked_fill(~mask, -100), **options)
    expected = reference.simreg(embeddings, labels, mask=mask, **options)
    assert by_mask.dtype == torch.float64
    torch.testing.assert_close(by_mask, expected, **CLOSE_DOUBLE)
    assert torch.equal(by_mask, by_label)
    torch.testing.assert_close(
        gradient(by_mask, embeddings), gradient(expected, embeddings), **CLOSE_DOUBLE
    )


@pytest.mark.parametrize("options", [*OPTIONS[1:5], {"chunk_size": 3, "temperature": 0.1}], ids=str)
def test_gradcheck(options: dict[str, Any]) -> None:
    embeddings, labels = problem(1, 5, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda e: simreg(e, labels, **options), (embeddings,))
    assert torch.autograd.gradcheck(
        lambda e: simreg(e, labels, reduction="none", **options), (embeddings,)
    )


@pytest.mark.parametrize("grouping", ["sum", "mean", "label"])
def test_by_hand(grouping: str) -> None:
    """Two tokens of one label at right angles, one of another along the first; tau = 1."""
    embeddings = torch.tensor([[[2.0, 0.0], [0.0, 3.0], [5.0, 0.0]]])
    labels = torch.tensor([[7, 7, 4]])
    e = math.e
    # L_1 = log e - log(e + 1), L_2 = log 1 - log(1 + e), L_3 = log(e + 1) - log e.
    ratios = [e / (e + 1), 1 / (1 + e), (e + 1) / e]
    if grouping == "mean":
        ratios = [2 * ratios[0], 2 * ratios[1], ratios[2] / 2]
    losses = [math.log1p(ratio) for ratio in ratios]
    weights = [0.25, 0.25, 0.5] if grouping == "label" else [1 / 3] * 3
    expected = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    options: dict[str, Any] = {"temperature": 1.0, "grouping": grouping}
    assert simreg(embeddings, labels, **options).item() == pytest.approx(expected, rel=1e-5)
    each = simreg(embeddings, labels, reduction="none", **options)
    assert each.shape == (1, 3)
    assert each[0].tolist() == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("hidden_size", [1024, 4096])
def test_weight_of_appendix_a2(hidden_size: int) -> None:
    assert simreg_weight(hidden_size) == pytest.approx(10 * (hidden_size / 1024) ** 0.5)
    with pytest.raises(ExitServeError, match="positive"):
        simreg_weight(0)


@settings(deadline=None, max_examples=30)
@given(
    options=st.sampled_from(OPTIONS[:5]),
    tokens=st.integers(2, 9),
    rows_at_once=st.integers(1, 9),
    seed=st.integers(0, 2**16),
)
def test_order_of_tokens_and_blocks_of_rows_do_not_matter(
    options: dict[str, Any], tokens: int, rows_at_once: int, seed: int
) -> None:
    embeddings, labels = problem(2, tokens, seed=seed, dtype=torch.float64)
    whole = simreg(embeddings, labels, **options)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "ROWS", rows_at_once)
        moved = simreg(embeddings[:, order], labels[:, order], **options)
    torch.testing.assert_close(moved, whole, **CLOSE_DOUBLE)
    torch.testing.assert_close(
        gradient(moved, embeddings), gradient(whole, embeddings), **CLOSE_DOUBLE
    )


@settings(deadline=None, max_examples=30)
@given(options=st.sampled_from(OPTIONS), seed=st.integers(0, 2**16))
def test_length_of_a_vector_does_not_matter_to_cosines(options: dict[str, Any], seed: int) -> None:
    if options.get("similarity") == "inner":
        return
    embeddings, labels = problem(seed=seed, dtype=torch.float64)
    lengths = torch.rand(2, 8, 1, generator=torch.Generator().manual_seed(seed)) * 10 + 0.1
    ours = simreg(embeddings * lengths, labels, **options)
    torch.testing.assert_close(ours, simreg(embeddings, labels, **options), **CLOSE_DOUBLE)


@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
def test_masked_tokens_might_as_well_not_be_there(options: dict[str, Any]) -> None:
    embeddings, labels = problem(1, 9, dtype=torch.float64)
    mask = torch.tensor([[True, False, True, True, False, True, True, True, False]])
    poisoned = embeddings.detach().masked_fill(~mask[..., None], math.nan).requires_grad_()
    ours = simreg(poisoned, labels, mask=mask, **options)
    kept = simreg(embeddings[mask][None], labels[mask][None], **options)
    torch.testing.assert_close(ours, kept, **CLOSE_DOUBLE)
    grad = gradient(ours, poisoned)
    torch.testing.assert_close(grad[mask], gradient(kept, embeddings)[mask], **CLOSE_DOUBLE)
    assert bool((grad[~mask] == 0).all())


def test_one_chunk_is_the_whole_and_even_chunks_are_separate_sequences() -> None:
    embeddings, labels = problem(2, 8)
    whole = simreg(embeddings, labels)
    assert torch.equal(simreg(embeddings, labels, chunk_size=8), whole)
    assert torch.equal(simreg(embeddings, labels, chunk_size=100), whole)
    chunked = simreg(embeddings, labels, chunk_size=4, chunk_weights="tokens")
    apart = simreg(embeddings.reshape(4, 4, -1), labels.reshape(4, 4))
    torch.testing.assert_close(chunked, apart)


def test_chunks_weigh_by_their_ratio_of_positive_to_negative_pairs() -> None:
    embeddings, _ = problem(1, 6)
    # Pairs within the chunks: 5 positive (each token with itself, and two), 4 negative; 3 and 6.
    labels = torch.tensor([[1, 1, 2, 1, 2, 3]])
    each = simreg(embeddings, labels, chunk_size=3, temperature=0.1, reduction="none")
    loss = simreg(embeddings, labels, chunk_size=3, temperature=0.1)
    first, second = 5 / 4, 3 / 6
    expected = (first * each[0, :3].mean() + second * each[0, 3:].mean()) / (first + second)
    torch.testing.assert_close(loss, expected)


def degenerate() -> dict[str, tuple[Tensor, Tensor]]:
    embeddings, labels = problem()
    embeddings = embeddings.detach()
    zero = embeddings.clone()
    zero[:, 2:5] = 0.0
    mixed = embeddings.clone()
    mixed[0, 0], mixed[0, 1], mixed[1] = mixed[0, 0] * 1e30, mixed[0, 1] * 1e-9, 1.0
    return {
        "one token": (embeddings[:1, :1], labels[:1, :1]),
        "labels all equal": (embeddings, torch.full_like(labels, 5)),
        "labels all distinct": (embeddings, torch.arange(16).reshape(2, 8)),
        "nothing counted": (embeddings, torch.full_like(labels, -100)),
        "one row not counted": (embeddings, labels.index_fill(0, torch.tensor([1]), -100)),
        "zero vectors": (zero, labels),
        "only zero vectors": (embeddings * 0.0, labels),
        "huge": (embeddings * 1e30, labels),
        "tiny": (embeddings * 1e-9, labels),
        "tinier than any direction": (embeddings * 1e-30, labels),
        "huge, tiny and equal": (mixed, labels),
        "float16": (embeddings.half(), labels),
        "bfloat16": (embeddings.bfloat16(), labels),
        "opposite": (torch.cat([embeddings, -embeddings], dim=1), torch.cat([labels, labels], 1)),
    }


@pytest.mark.parametrize("case", list(degenerate()))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_degenerate_inputs_are_finite(options: dict[str, Any], case: str) -> None:
    embeddings, labels = degenerate()[case]
    embeddings.requires_grad_()
    loss = simreg(embeddings, labels, **options)
    each = simreg(embeddings, labels, reduction="none", **options)
    assert loss.dtype == each.dtype == torch.float32
    assert each.shape == labels.shape
    grad = gradient(loss, embeddings)
    assert math.isfinite(loss.item())
    assert loss.item() >= 0.0
    assert bool(each.isfinite().all())
    assert bool(grad.isfinite().all())
    if case in ("one token", "labels all equal", "nothing counted"):
        assert loss.item() == 0.0
        assert bool((grad == 0).all())
    if case == "only zero vectors" and options.get("similarity") != "inner":
        assert bool((grad == 0).all())


def test_not_a_number_is_not_hidden() -> None:
    embeddings, labels = problem()
    broken = embeddings.detach().clone()
    broken[0, 0, 0] = math.nan
    assert math.isnan(simreg(broken, labels).item())


def test_unit_vectors_have_length_one_or_none() -> None:
    vectors = torch.tensor([[3e38, 3e38], [1e-11, 0.0], [0.0, 0.0], [-3.0, 4.0]])
    half = 2**-0.5
    expected = torch.tensor([[half, half], [1.0, 0.0], [0.0, 0.0], [-0.6, 0.8]])
    torch.testing.assert_close(unit_vectors(vectors, pairs.ZERO), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    embeddings, labels = problem()
    half = embeddings.detach().to(dtype)
    ours, exact = simreg(half, labels), simreg(half.float(), labels)
    assert torch.equal(ours, exact)


def test_autocast_changes_nothing() -> None:
    embeddings, labels = problem()
    plain = simreg(embeddings, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = simreg(embeddings, labels)
    assert torch.equal(cast, plain)
    assert torch.equal(gradient(cast, embeddings), gradient(plain, embeddings))


def test_similarities_of_one_block_of_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory claim: no block is larger than it may be, and none is kept for backward."""
    monkeypatch.setattr(pairs, "ROWS", 16)
    shapes: list[torch.Size] = []
    plain = module.similarities

    def watched(rows: Tensor, columns: Tensor, temperature: float) -> Tensor:
        scores = plain(rows, columns, temperature)
        shapes.append(scores.shape)
        return scores

    monkeypatch.setattr(module, "similarities", watched)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    embeddings, labels = problem(2, 64)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = simreg(embeddings, labels)
    assert shapes == [torch.Size([2, 16, 64])] * 4
    assert max(kept) < 2 * 16 * 64
    loss.backward()
    assert len(shapes) == 2 * 4, "each block is computed once forward, once in backward"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"similarity": "cosin"}, "similarity 'cosin' is unknown.*Did you mean 'cosine'"),
        ({"grouping": "labels"}, "grouping 'labels' is unknown.*Did you mean 'label'"),
        ({"chunk_weights": "pairs"}, "chunk_weights 'pairs' is unknown; allowed: ratio, tokens"),
        ({"reduction": "sum"}, "reduction 'sum' is unknown; allowed: mean, none"),
        ({"temperature": 0.0}, "temperature 0.0 must be"),
        ({"temperature": math.nan}, "temperature nan must be"),
        ({"chunk_size": 0}, "chunk_size 0 must be at least 1"),
        ({"mask": torch.ones(2, 3, dtype=torch.bool)}, "mask has shape"),
        ({"labels": torch.zeros(2, 3, dtype=torch.long)}, "do not fit labels"),
        ({"embeddings": torch.zeros(2, 8)}, "do not fit labels"),
        ({"embeddings": torch.zeros(2, 0, 6)}, "do not fit labels"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    embeddings, labels = problem()
    arguments: dict[str, Any] = {"embeddings": embeddings, "labels": labels} | change
    with pytest.raises(ExitServeError, match=message):
        simreg(arguments.pop("embeddings"), arguments.pop("labels"), **arguments)
