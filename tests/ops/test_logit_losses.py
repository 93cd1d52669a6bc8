"""Losses of logits and their gradient: the reference against autograd, both forms against it."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from exitserve_kernels.dispatch import Form
from exitserve_kernels.logit_losses import in_place, logit_losses

from . import reference
from .testing import poisoned_allocations

TYPES = [torch.float32, torch.bfloat16, torch.float16]
# The kernel takes 2048 logits at a time: one block with a rest, and three.
SHAPES = [(1, 41), (2, 5000)]
OPTIONS: list[dict[str, Any]] = [{}, {"temperature": 0.5, "soft_cap": 30.0}]
PARTS = ["both", "labels", "teacher"]
# Logits of up to 30 have float32 steps of 2e-6, and a mean of their gaps adds several of them.
LOSS_ROOM = {"rtol": 1e-6, "atol": 1e-5}
# A share exp(a - max) has such a step as relative error, and is at most 1.
GRADIENT_ROOM = 4e-6
Arguments = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@pytest.fixture(params=["torch", "triton"])
def form(request: pytest.FixtureRequest, device: torch.device) -> Form:
    """Either form; also on the CPU, where Triton interprets."""
    chosen: Form = request.param
    return chosen


def arguments(
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    parts: str = "both",
) -> Arguments:
    generator = torch.Generator().manual_seed(sum(shape))
    logits = 4.0 * torch.randn(shape, generator=generator)
    teacher = (logits + 2.0 * torch.randn(shape, generator=generator)).to(device, dtype)
    labels = torch.randint(shape[1], shape[:1], generator=generator).to(device)
    scales = torch.rand(2, shape[0], generator=generator).to(device)
    first = logits.to(device, dtype)
    with_labels = (labels, scales[0]) if parts != "teacher" else (None, None)
    return first, *with_labels, *((teacher, scales[1]) if parts != "labels" else (None, None))


def in_float64(given: Arguments) -> Arguments:
    wide = [one.double() if one is not None and one.is_floating_point() else one for one in given]
    return tuple(wide)  # type: ignore[return-value]


def assert_right(given: Arguments, form: Form, **options: Any) -> Tensor:
    """Compares with the reference in float64; returns the gradient."""
    logits, *others = given
    exact, *exact_others = in_float64(given)
    exact = exact.clone()
    truth = reference.logit_losses(exact, *exact_others, **options)
    gradient = logits.clone(memory_format=torch.preserve_format)
    teacher = None if others[2] is None else others[2].clone()
    with poisoned_allocations():
        found = logit_losses(gradient, *others, **options, implementation=form)
    for one, other in zip(found, truth, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.dtype == torch.float32
            torch.testing.assert_close(one.double(), other, **LOSS_ROOM)
    assert gradient.dtype == logits.dtype
    # Half a step of its type is what writing it costs.
    step = torch.finfo(gradient.dtype).eps
    torch.testing.assert_close(gradient.double(), exact, rtol=0.51 * step, atol=GRADIENT_ROOM)
    assert teacher is None or torch.equal(teacher, others[2])
    return gradient


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 4),
    vocabulary=st.integers(1, 9),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    soft_cap=st.sampled_from([None, 2.0, 30.0]),
    parts=st.sampled_from(PARTS),
    weights=st.sampled_from([0.0, 1.0, -0.5]),
    seed=st.integers(0, 2**16),
)
@pytest.mark.parametrize("compute", [reference.logit_losses, in_place.logit_losses])
def test_pytorch_is_autograd(
    compute: Any,
    count: int,
    vocabulary: int,
    temperature: float,
    soft_cap: float | None,
    parts: str,
    weights: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    leaf, teacher = 4.0 * torch.randn(2, count, vocabulary, generator=generator).double()
    labels = torch.randint(vocabulary, (count,), generator=generator)
    scales = weights + torch.rand(2, count, generator=generator).double() * (weights != 0.0)
    leaf.requires_grad_()
    a = leaf if soft_cap is None else soft_cap * torch.tanh(leaf / soft_cap)
    expected = [None, None]
    if parts != "teacher":
        expected[0] = functional.cross_entropy(a, labels, reduction="none")
    if parts != "labels":
        target = (teacher / temperature).softmax(-1)
        student = (a / temperature).log_softmax(-1)
        expected[1] = functional.kl_div(student, target, reduction="none").sum(-1)
    loss = sum((s * x).sum() for s, x in zip(scales, expected, strict=True) if x is not None)
    (slope,) = torch.autograd.grad(loss, leaf)
    gradient = leaf.detach().clone()
    found = compute(
        gradient,
        labels if parts != "teacher" else None,
        scales[0],
        teacher if parts != "labels" else None,
        scales[1],
        temperature=temperature,
        soft_cap=soft_cap,
    )
    # float64 steps of 1e-16 of logits up to 20, divided by 0.3.
    torch.testing.assert_close([*found, gradient], [*expected, slope], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_losses_and_gradient_are_those_of_the_reference(
    shape: tuple[int, int], options: dict[str, Any], parts: str, form: Form, device: torch.device
) -> None:
    assert_right(arguments(shape, device, parts=parts), form, **options)


@pytest.mark.parametrize("taught", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_types(
    options: dict[str, Any],
    dtype: torch.dtype,
    taught: torch.dtype,
    form: Form,
    device: torch.device,
) -> None:
    logits, labels, ce_scale, teacher, kl_scale = arguments((3, 1271), device, dtype)
    assert teacher is not None
    given = (logits, labels, ce_scale, teacher.to(taught), kl_scale)
    assert_right(given, form, **options)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_tokens_that_are_sure(dtype: torch.dtype, form: Form, device: torch.device) -> None:
    """Right and wrong, by 40 to 30000 nats, in any block: powers overflow, or all but one are 0."""
    _, _, ce_scale, teacher, kl_scale = arguments((6, 5000), device, dtype)
    logits = torch.zeros(6, 5000, device=device, dtype=dtype)
    rows, places = torch.arange(6, device=device), torch.tensor([0, 4999, 2500] * 2, device=device)
    heights = torch.tensor([40.0, 300.0, 30000.0] * 2, device=device)
    logits[rows, places] = heights.to(dtype)
    labels = torch.where(rows < 3, places, 1)
    assert_right((logits, labels, ce_scale, teacher, kl_scale), form)
    # The divergence is a mean of gaps, and a gap of 30 has steps of 2e-6, one of 30000 of 2e-3.
    assert_right((teacher, None, None, logits / 1000.0, kl_scale), form)


def test_the_label_s_gradient_has_all_its_digits(device: torch.device) -> None:
    """1 - p = 1e-9 is lost in 1 - p; the kernel adds up the others instead."""
    logits = torch.zeros(1, 3000, device=device)
    logits[0, 2100] = 29.0
    label, one = torch.tensor([2100], device=device), torch.ones(1, device=device)
    logit_losses(logits, label, one, None, None, implementation="triton")
    expected = -2999 * math.exp(-29.0)
    assert float(logits[0, 2100]) == pytest.approx(expected, rel=1e-5)
    assert float(logits.double().sum()) == pytest.approx(0.0, abs=1e-5 * -expected)


def test_logits_may_lie_further_apart_than_32_bits_count(device: torch.device) -> None:
    """As a transposed product of many tokens; of the memory between them nothing is touched."""
    apart = torch.empty(2**31 + 2, dtype=torch.bfloat16, device=device)
    logits = apart.as_strided((2, 3), (1, 2**30)).copy_(torch.arange(6.0).view(2, 3))
    given = logits.contiguous(), torch.tensor([2, 0], device=device), torch.ones(2, device=device)
    expected, _ = logit_losses(*given, None, None, implementation="torch")
    found, _ = logit_losses(logits, *given[1:], None, None, implementation="triton")
    torch.testing.assert_close((found, logits), (expected, given[0]))


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0}], ids=str)
@pytest.mark.parametrize("masked", [slice(0, 2100), slice(40, None, 7), slice(4000, None)])
def test_a_masked_vocabulary_is_a_smaller_one(
    masked: slice, options: dict[str, Any], form: Form, device: torch.device
) -> None:
    """Student and teacher at -inf; a block of the kernel's is so from end to end, at first."""
    logits, labels, ce_scale, teacher, kl_scale = arguments((3, 5000), device)
    assert teacher is not None
    kept = torch.ones(5000, dtype=torch.bool, device=device)
    kept[masked] = False
    labels = torch.tensor([0, 5, 700], device=device)
    few = logits[:, kept].double()
    truth = reference.logit_losses(
        few, labels, ce_scale, teacher[:, kept].double(), kl_scale, **options
    )
    given = [one.masked_fill(~kept, -math.inf) for one in (logits, teacher)]
    places = kept.nonzero()[labels, 0]
    found = logit_losses(
        given[0], places, ce_scale, given[1], kl_scale, **options, implementation=form
    )
    for one, other in zip(found, truth, strict=True):
        torch.testing.assert_close(one, other, check_dtype=False, **LOSS_ROOM)
    torch.testing.assert_close(given[0][:, kept].double(), few, rtol=0.0, atol=GRADIENT_ROOM)
    assert given[0][:, ~kept].count_nonzero() == 0


def test_infinite_logits_of_one_side(form: Form, device: torch.device) -> None:
    """Where the teacher is at -inf nothing is lost; where the student alone is, everything."""
    logits, labels, ce_scale, teacher, kl_scale = arguments((2, 5000), device)
    assert teacher is not None
    teacher[0, ::3] = logits[0, ::6] = -math.inf
    logits[1, 4000] = -math.inf
    # So unlikely that Q is 0 in float32, though within the kernel's first block it is not.
    teacher[0, :2500] -= 300.0
    teacher[0, [1, 4001]], logits[0, [1, 4001]] = -300.0, -math.inf
    labels = torch.tensor([7, 8], device=device)
    kept = [logits.clone(), teacher.clone()]
    truth = reference.logit_losses(kept[0], labels, ce_scale, kept[1], kl_scale)
    found = logit_losses(logits, labels, ce_scale, teacher, kl_scale, implementation=form)
    assert found[1] is not None
    assert found[1].isfinite().tolist() == [True, False]
    assert float(found[1][1]) == math.inf
    torch.testing.assert_close(list(found), list(truth), **LOSS_ROOM)
    assert logits.isfinite().all()
    torch.testing.assert_close(logits, kept[0], rtol=0.0, atol=GRADIENT_ROOM)
