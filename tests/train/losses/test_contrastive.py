"""SimReg's baselines against the loops of their reference, by hand, and in degenerate cases."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from exitserve.errors import ExitServeError
from exitserve_training.losses.contrastive import cpretrain, creg, sce, simcse
from exitserve_training.losses.reference import similarity as reference

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
