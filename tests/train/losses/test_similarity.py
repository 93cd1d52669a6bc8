"""Chunks and second views of SimReg and its baselines; `table.py` compares their values."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from exitserve_training.losses.contrastive import sce, simcse
from exitserve_training.losses.similarity import simreg
from exitserve_training.objectives.simreg.options import SimRegOptions

from . import references


def problem(
    rows: int = 2, tokens: int = 8, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(rows, tokens, 6, generator=generator, dtype=dtype)
    # Not only orthogonal-ish vectors: a common part, as trained models have.
    embeddings += 0.5 * torch.randn(6, generator=generator, dtype=dtype)
    labels = torch.randint(3, (rows, tokens), generator=generator)
    return embeddings.requires_grad_(), labels


def test_weight_of_appendix_a2() -> None:
    assert SimRegOptions().weight_for(4096) == pytest.approx(20.0)


def test_one_chunk_is_the_whole() -> None:
    embeddings, labels = problem(2, 8)
    whole = simreg(embeddings, labels)
    assert torch.equal(simreg(embeddings, labels, chunk_size=8), whole)
    assert torch.equal(simreg(embeddings, labels, chunk_size=100), whole)


def test_chunks_weigh_by_their_ratio_of_positive_to_negative_pairs() -> None:
    embeddings, _ = problem(1, 6)
    # Pairs within the chunks: 5 positive (each token with itself, and two), 4 negative; 3 and 6.
    labels = torch.tensor([[1, 1, 2, 1, 2, 3]])
    loss = simreg(embeddings, labels, chunk_size=3, temperature=0.1)
    first, second = 5 / 4, 3 / 6
    halves = (slice(0, 3), slice(3, 6))
    parts = [simreg(embeddings[:, at], labels[:, at], temperature=0.1) for at in halves]
    expected = (first * parts[0] + second * parts[1]) / (first + second)
    torch.testing.assert_close(loss, expected)


def test_not_a_number_is_not_hidden() -> None:
    embeddings, labels = problem()
    broken = embeddings.detach().clone()
    broken[0, 0, 0] = math.nan
    assert math.isnan(simreg(broken, labels).item())


@pytest.mark.parametrize(
    ("ours", "theirs"), [(simcse, references.simcse), (sce, references.sce)], ids=["simcse", "sce"]
)
def test_second_view(ours: Callable[..., Tensor], theirs: Callable[..., Tensor]) -> None:
    embeddings, labels = problem(3, dtype=torch.float64)
    views = problem(3, seed=1, dtype=torch.float64)[0]
    loss, expected = (one(embeddings, labels, views=views) for one in (ours, theirs))
    both = torch.autograd.grad(loss, [embeddings, views], allow_unused=True)
    wanted = torch.autograd.grad(expected, [embeddings, views], allow_unused=True)
    torch.testing.assert_close([loss, both[0]], [expected, wanted[0]], rtol=1e-9, atol=1e-10)
    if ours is sce:
        assert both[1] is None, "the target network gets no gradient"
    else:
        torch.testing.assert_close(both[1], wanted[1], rtol=1e-9, atol=1e-10)
