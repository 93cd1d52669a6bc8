"""SimReg against the loops of its reference, by hand, and where its formula degenerates."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from exitserve.errors import ExitServeError
from exitserve_training.losses import pairs
from exitserve_training.losses.similarity import simreg, simreg_weight
from exitserve_training.losses.tokens import unit_vectors


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
