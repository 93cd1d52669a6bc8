"""SimReg's log-sum-exps in Triton: values and gradients against float64, edges, and the loss."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from exitserve_kernels import in_triton
from exitserve_kernels.dispatch import VARIABLE
from exitserve_kernels.simreg import log_sums
from exitserve_kernels.testing import LargestTensor, assert_no_worse, poisoned_allocations
from exitserve_training.losses import similarity
from exitserve_training.losses.similarity import simreg

TYPES = [torch.float32, torch.bfloat16, torch.float16]
# Tiles are 64 tokens, backward takes 256 rows at a time, components come in sixteens.
SHAPES = [(3, 5, 3), (2, 65, 33), (1, 300, 8)]
TEMPERATURE = 0.05
# A gradient may err three times as much as PyTorch's. The interpreter's product (numpy's) adds
# s_ij and s_ji in different orders, and shares exp(s_ij - log sum_j) then no longer sum to 1: at
# scores of hundreds that is 1.5 times the error on average and 2.3 at worst (with a product that
# is symmetric, as a GPU's is, 0.95 and 1.1).
GRADIENT_TIMES = 3.0
# Gradients from the same terms in another order: float32 steps of 1e-7 of terms that cancel and
# are up to 1 / temperature = 20 times a gradient of either sum, which is up to 3.
REORDERED = {"rtol": 1e-5, "atol": 1e-4}


def inputs(
    shape: tuple[int, int, int], device: torch.device, classes: int = 5, ignored: float = 0.1
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    vectors = torch.randn(shape, generator=generator)
    # A common part, as trained models' states have: it cancels in the gradient.
    vectors += torch.randn(shape[2], generator=generator)
    labels = torch.randint(classes, shape[:2], generator=generator)
    if shape[1] > 2:
        labels[torch.rand(shape[:2], generator=generator) < ignored] = -100
    return functional.normalize(vectors, dim=-1).to(device), labels.to(device)


def upstream(labels: Tensor, seed: int = 0) -> Tensor:
    """Gradients of both sums, [2, B, T], of either sign."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, *labels.shape, generator=generator).to(labels.device)


def computed(
    vectors: Tensor, labels: Tensor, form: Any, of: Tensor, temperature: float = TEMPERATURE
) -> tuple[Tensor, Tensor, Tensor]:
    """Both sums and the gradient in the vectors of their sum times `of`."""
    leaf = vectors.detach().requires_grad_()
    sums = log_sums(leaf, labels, temperature, form)
    (gradient,) = torch.autograd.grad(sums, leaf, [part.to(sums[0].dtype) for part in of])
    return sums[0].detach(), sums[1].detach(), gradient


def assert_right(
    vectors: Tensor, labels: Tensor, of: Tensor, temperature: float = TEMPERATURE
) -> None:
    """Errs at most twice as much as PyTorch: float32 sums of the same terms in two orders."""
    with poisoned_allocations():
        fused = computed(vectors, labels, "triton", of, temperature)
    plain = computed(vectors, labels, "torch", of, temperature)
    exact = computed(vectors.double(), labels, "torch", of, temperature)
    allowed = (2.0, 2.0, GRADIENT_TIMES)
    for one, other, truth, times in zip(fused, plain, exact, allowed, strict=True):
        assert one.dtype == other.dtype
        assert_no_worse(one, other, truth, times)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradient_are_those_of_float64(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    vectors, labels = inputs(shape, device)
    assert_right(vectors.to(dtype), labels, upstream(labels))


@pytest.mark.parametrize("temperature", [0.01, 1.0, 30.0])
def test_temperatures(temperature: float, device: torch.device) -> None:
    vectors, labels = inputs((2, 70, 20), device)
    assert_right(vectors, labels, upstream(labels), temperature)


def test_scores_far_beyond_what_exp_can_hold(device: torch.device) -> None:
    """exp(700) is infinite in float32; long vectors first, so that the running greatest moves."""
    vectors, labels = inputs((1, 140, 8), device)
    for order in (slice(None), torch.arange(139, -1, -1, device=device)):
        longer = vectors * torch.linspace(1.0, 6.0, 140, device=device)[order][None, :, None]
        assert_right(longer, labels, upstream(labels))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", ["same", "distinct", "one counted", "none counted", "one token"])
def test_groups_that_are_empty_or_single(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    tokens = 1 if kind == "one token" else 70
    vectors, labels = inputs((2, tokens, 12), device, ignored=0.0)
    if kind == "same":
        labels.fill_(3)
    if kind == "distinct":
        labels = torch.arange(140, device=device).reshape(2, 70)
    if kind in ("one counted", "none counted"):
        labels[:, 1:] = -5
    if kind == "none counted":
        labels[:] = -1
    vectors = vectors.to(dtype)
    assert_right(vectors, labels, upstream(labels))
    negatives, positives, gradient = computed(vectors, labels, "triton", upstream(labels))
    if kind != "distinct":
        assert bool((negatives == -math.inf).all())
    if kind == "none counted":
        assert bool((positives == -math.inf).all())
        assert gradient.count_nonzero() == 0


def test_tokens_that_do_not_count_might_as_well_not_be_there(device: torch.device) -> None:
    vectors, labels = inputs((1, 150, 20), device, ignored=0.3)
    kept = labels >= 0
    spoiled = vectors.masked_fill(~kept[..., None], math.nan)
    of = upstream(labels)
    # Nor may anything flow back through their sums, as it does from -inf - -inf.
    spoiled_of = of.masked_fill(~kept, math.nan)
    found = computed(spoiled, labels, "triton", spoiled_of)
    few = computed(
        vectors[kept][None],
        labels[kept][None],
        "triton",
        torch.stack([part[kept][None] for part in of]),
    )
    for one, other in zip(found, few, strict=True):
        torch.testing.assert_close(one[kept], other[0], **REORDERED)
    assert bool((found[2][~kept] == 0).all())


def test_nan_reaches_what_it_is_compared_with_and_nothing_else(device: torch.device) -> None:
    vectors, labels = inputs((2, 130, 12), device)
    labels[0, 100] = 2
    vectors[0, 100, 3] = math.nan
    assert_right(vectors, labels, upstream(labels))
    negatives, positives = log_sums(vectors, labels, TEMPERATURE, "triton")
    counted = labels[0] >= 0
    assert torch.equal(positives[0].isnan(), labels[0] == 2)
    other = counted & (labels[0] != 2)
    other[100] = True
    assert torch.equal(negatives[0].isnan(), other)
    assert not negatives[1].isnan().any()
    assert not positives[1].isnan().any()


def test_strided_inputs(device: torch.device) -> None:
    vectors, labels = inputs((2, 70, 12), device)
    of = upstream(labels)
    expected = computed(vectors, labels, "triton", of)
    apart = torch.full((4, 140, 24), math.nan, device=device)[::2, ::2, ::2]
    apart.copy_(vectors)
    turned = vectors.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    spread = labels.T.contiguous().T
    spread_of = of.mT.contiguous().mT
    assert not spread_of[0].is_contiguous()
    for strided in (apart, turned):
        assert not strided.is_contiguous()
        found = computed(strided, spread, "triton", spread_of)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def test_pairs_exist_for_a_few_rows_at_a_time(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors, labels = inputs((1, 200, 8), device)
    expected = computed(vectors, labels, "triton", upstream(labels))
    # No multiple of the tiles: rows beyond a block are the next one's.
    monkeypatch.setattr(in_triton, "ROWS", 50)
    with poisoned_allocations(), LargestTensor() as largest:
        found = computed(vectors, labels, "triton", upstream(labels))
    assert largest.nbytes == 50 * 200 * 4
    # PyTorch's product of fewer rows may add in another order.
    torch.testing.assert_close(found[2], expected[2], **REORDERED)


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.1, "grouping": "mean"},
    {"similarity": "inner", "temperature": 5.0},
    {"chunk_size": 33, "grouping": "label", "chunk_weights": "tokens"},
    {"reduction": "none"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_whole_loss_is_that_of_pytorch(
    options: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, labels = inputs((2, 70, 16), device)
    states = states * 3.0
    labels[0, 5] = -3  # a label like any other: -100 alone is ignored
    mask = torch.rand(labels.shape, generator=torch.Generator().manual_seed(0)) < 0.9
    mask = mask.to(device)
    calls = []

    def watched(*args: Any) -> tuple[Tensor, Tensor]:
        calls.append(args)
        return log_sums(*args)

    monkeypatch.setattr(similarity, "log_sums", watched)

    def loss(form: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        monkeypatch.setenv(VARIABLE, form)
        leaf = states.to(dtype).requires_grad_()
        value = simreg(leaf, labels, mask=mask, **options)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach(), gradient

    plain, exact = loss("torch", torch.float32), loss("triton", torch.float64)
    assert not calls
    fused = loss("triton", torch.float32)
    assert len(calls) == 1
    for one, other, truth in zip(fused, plain, exact, strict=True):
        assert_no_worse(one, other, truth, GRADIENT_TIMES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(2, 3, dtype=torch.int64)}, r"vectors \(2, 8, 4\) and labels \(2"),
        ({"vectors": torch.zeros(2, 8)}, r"expected \[B, T, D\] and \[B, T\]"),
        ({"vectors": torch.zeros(2, 8, 4).long()}, "expected a floating-point type"),
        ({"labels": torch.zeros(2, 8)}, r"labels\.dtype is torch.float32; expected torch.int64"),
        ({"temperature": 0.0}, "temperature 0.0 must be a finite number above 0"),
        ({"temperature": math.nan}, "temperature nan must be"),
        ({"implementation": "cuda"}, "implementation 'cuda' is unknown; allowed: auto, triton"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "vectors": torch.zeros(2, 8, 4),
        "labels": torch.zeros(2, 8, dtype=torch.int64),
        "temperature": 1.0,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        log_sums(**arguments)
