"""The dispersion loss's log-sum-exp in Triton: values, gradients, edges, and the loss."""

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from exitserve_kernels import in_triton
from exitserve_kernels.dispatch import VARIABLE
from exitserve_kernels.dispersion import log_sum
from exitserve_kernels.in_triton import arccos
from exitserve_kernels.testing import LargestTensor, assert_no_worse, poisoned_allocations
from exitserve_training.losses import spread
from exitserve_training.losses.spread import dispersion

TYPES = [torch.float32, torch.bfloat16, torch.float16]
# Tiles are 64 tokens, backward takes 256 rows at a time, components come in thirty-twos.
SHAPES = [(3, 5, 3), (2, 65, 33), (1, 300, 8)]
# The whole gradient is a multiple of exp(-log sum). The log of a sum over 10^4 pairs is about 9,
# where float32 rounds it by up to 5e-7, here or there: on average neither errs more than 1.5
# times as much as the other, at worst 3 times.
GRADIENT_TIMES = 3.0


def inputs(
    shape: tuple[int, int, int], device: torch.device, counting: float = 0.9
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    # A cone, as condensed states are: cosines from about -0.5 to 0.9.
    units = torch.randn(shape, generator=generator) + 0.7
    mask = torch.rand(shape[:2], generator=generator) < counting
    mask[:, :2] = True
    return functional.normalize(units, dim=-1).to(device), mask.to(device)


def upstream(sequences: int, device: torch.device) -> Tensor:
    """A gradient of each sequence's sum, of either sign."""
    return torch.linspace(1.0, -2.5, sequences + 1, device=device)[:sequences]


def computed(
    units: Tensor, mask: Tensor, form: Any, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The sums and the gradient in the vectors of their sum times `upstream`."""
    leaf = units.detach().requires_grad_()
    sums = log_sum(leaf, mask, temperature, form)
    (gradient,) = torch.autograd.grad(sums, leaf, upstream(len(sums), units.device).to(sums.dtype))
    return sums.detach(), gradient


def assert_right(units: Tensor, mask: Tensor, temperature: float = 1.0) -> None:
    """Errs at most twice as much as PyTorch: float32 sums of the same terms in two orders."""
    with poisoned_allocations():
        fused = computed(units, mask, "triton", temperature)
    plain = computed(units, mask, "torch", temperature)
    exact = computed(units.double(), mask, "torch", temperature)
    for one, other, truth, times in zip(fused, plain, exact, (2.0, GRADIENT_TIMES), strict=True):
        assert one.dtype == other.dtype
        assert_no_worse(one, other, truth, times)


@triton.jit
def arccos_of(cosines, angles, count: tl.constexpr):
    place = tl.program_id(0) * count + tl.arange(0, count)
    tl.store(angles + place, arccos(tl.load(cosines + place)))


def test_arccos_errs_by_rounding_alone(device: torch.device) -> None:
    """2.2e-7: less than one step of float32 at angles above 2, and PyTorch's own error is 1.9e-7.

    Near 1, where an angle is the square root of what is missing, the error is relative.
    """
    even = torch.linspace(-1.0, 1.0, 2**18 - 2048)
    near_one = 1.0 - torch.logspace(-7, -1, 1024, dtype=torch.float64).float()
    cosines = torch.cat([even, near_one, -near_one]).to(device)
    angles = torch.empty_like(cosines)
    arccos_of[(16,)](cosines, angles, 2**14)
    truth = cosines.double().arccos()
    errors = (angles.double() - truth).abs()
    assert float(errors.max()) <= 2.2e-7
    assert float((errors / truth.clamp_min(1e-7))[cosines > 0.5].max()) <= 3e-7
    # Both ends, exactly; a step of rounding at 0.
    ends = torch.tensor([1.0, -1.0, 0.0, math.nan], device=device)
    found = torch.empty_like(ends)
    arccos_of[(1,)](ends, found, 4)
    torch.testing.assert_close(found, ends.arccos(), rtol=0, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradient_are_those_of_float64(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    units, mask = inputs(shape, device)
    assert_right(units.to(dtype), mask)


@pytest.mark.parametrize("temperature", [0.001, 0.1, 2.0])
def test_temperatures(temperature: float, device: torch.device) -> None:
    """At 0.001 the powers reach e^-1000, far below what float32 can hold."""
    assert_right(*inputs((2, 140, 20), device), temperature)


def test_pairs_that_are_nearly_equal_or_opposite(device: torch.device) -> None:
    """Both sides of the cut, where the slope is steepest, and pairs beyond: equal, opposite."""
    angles = torch.tensor([0.0, 5e-3, 2e-2, 2e-2, 3e-2, 1.0, math.pi, math.pi + 4e-3, 4.0])
    units = torch.stack([angles.cos(), angles.sin()], dim=-1)[None].to(device)
    mask = torch.ones(1, 9, dtype=torch.bool, device=device)
    fused = computed(units, mask, "triton", 0.1)
    exact = computed(units.double(), mask, "torch", 0.1)
    # Products of float32 are off by 6e-8, which at an angle of 4e-3 is 1.5e-5 of angle, and in
    # the slope 1 / sin(angle) a relative 6e-8 / 4e-3^2 = 4e-3.
    torch.testing.assert_close(fused[0].double(), exact[0], rtol=0, atol=2e-5)
    scale = float(exact[1].abs().max())
    torch.testing.assert_close(fused[1].double(), exact[1], rtol=0, atol=8e-3 * scale)
    # Equal vectors push each other no more.
    twice = units[:, [5, 5]].contiguous()
    total, gradient = computed(twice, mask[:, :2], "triton")
    assert gradient.count_nonzero() == 0
    # At the cut the angle is sqrt(2e-6), in half turns 4.5e-4; float32 rounds it by 3 in 100.
    assert total.item() == pytest.approx(math.log(2.0) - math.sqrt(2e-6) / math.pi, abs=1.5e-5)


@pytest.mark.parametrize("kind", ["one token", "one counted", "none counted"])
def test_no_pair_gives_minus_infinity_and_no_gradient(kind: str, device: torch.device) -> None:
    units, mask = inputs((2, 1 if kind == "one token" else 70, 12), device)
    mask = torch.zeros_like(mask)
    mask[:, -1] = kind != "none counted"
    leaf = units.requires_grad_()
    sums = log_sum(leaf, mask, 1.0, "triton")
    assert sums.tolist() == [-math.inf] * 2
    # What comes back from log-mean-exps of -inf.
    (gradient,) = torch.autograd.grad(sums, leaf, torch.full_like(sums, math.nan))
    assert gradient.count_nonzero() == 0


def test_tokens_that_do_not_count_might_as_well_not_be_there(device: torch.device) -> None:
    units, mask = inputs((1, 150, 20), device, counting=0.7)
    found = computed(units.masked_fill(~mask[..., None], math.nan), mask, "triton", 0.1)
    kept = units[mask][None]
    few = computed(kept, torch.ones_like(mask[:, : kept.shape[1]]), "triton", 0.1)
    # The same terms in other tiles: a few roundings of 1e-7.
    torch.testing.assert_close(found[0], few[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1][mask], few[1][0], rtol=1e-5, atol=1e-6)
    assert bool((found[1][~mask] == 0).all())


def test_nan_makes_its_sequence_nan_and_no_other(device: torch.device) -> None:
    units, mask = inputs((2, 130, 12), device)
    units[0, 100, 3] = math.nan
    mask[0, 100] = True
    sums, gradient = computed(units, mask, "triton")
    assert sums.isnan().tolist() == [True, False]
    assert bool(gradient[0][mask[0]].isnan().all())
    assert not gradient[1].isnan().any()


def test_strided_inputs(device: torch.device) -> None:
    units, mask = inputs((2, 70, 12), device)
    expected = computed(units, mask, "triton")
    apart = torch.full((4, 140, 24), math.nan, device=device)[::2, ::2, ::2]
    apart.copy_(units)
    turned = units.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for strided in (apart, turned):
        assert not strided.is_contiguous()
        found = computed(strided, mask.T.contiguous().T, "triton")
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
    # The gradient of a sum is one number, expanded.
    leaves = [units.clone().requires_grad_() for _ in range(2)]
    log_sum(leaves[0], mask, 1.0, "triton").sum().backward()
    log_sum(leaves[1], mask, 1.0, "triton").backward(torch.ones(2, device=device))
    assert leaves[0].grad is not None
    assert torch.equal(leaves[0].grad, leaves[1].grad)


def test_pairs_exist_for_a_few_rows_at_a_time(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    units, mask = inputs((1, 200, 8), device)
    expected = computed(units, mask, "triton")
    # No multiple of the tiles: rows beyond a block are the next one's.
    monkeypatch.setattr(in_triton, "ROWS", 50)
    with poisoned_allocations(), LargestTensor() as largest:
        found = computed(units, mask, "triton")
    assert largest.nbytes == 50 * 200 * 4
    # PyTorch's product of fewer rows may add in another order.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_the_whole_loss_is_that_of_pytorch(
    temperature: float, reduction: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    units, mask = inputs((3, 140, 16), device)
    mask[2, 1:] = False  # no pair: left out of the mean
    states = (units * 3.0).masked_fill(~mask[..., None], math.nan)
    calls = []

    def watched(*args: Any) -> Tensor:
        calls.append(args)
        return log_sum(*args)

    monkeypatch.setattr(spread, "log_sum", watched)

    def loss(form: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        monkeypatch.setenv(VARIABLE, form)
        leaf = states.to(dtype).requires_grad_()
        value = dispersion(leaf, temperature=temperature, mask=mask, reduction=reduction)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach(), gradient

    plain, exact = loss("torch", torch.float32), loss("triton", torch.float64)
    assert not calls
    fused = loss("triton", torch.float32)
    assert len(calls) == 1
    # The log of a sum over 10^4 pairs is about 9, where a float32 step is 1e-6: two such roundings.
    torch.testing.assert_close(fused[0].double(), exact[0], rtol=0, atol=2e-6)
    assert_no_worse(fused[1], plain[1], exact[1], GRADIENT_TIMES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": torch.ones(2, 3, dtype=torch.bool)}, r"units \(2, 8, 4\) and mask \(2, 3\) do"),
        ({"units": torch.zeros(2, 8)}, r"expected \[B, T, D\] and \[B, T\]"),
        ({"units": torch.zeros(2, 8, 4).long()}, "expected a floating-point type"),
        ({"mask": torch.ones(2, 8)}, r"mask\.dtype is torch.float32; expected torch.bool"),
        ({"temperature": 0.0}, "temperature 0.0 must be a finite number above 0"),
        ({"temperature": math.nan}, "temperature nan must be"),
        ({"implementation": "cuda"}, "implementation 'cuda' is unknown; allowed: auto, triton"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "units": torch.zeros(2, 8, 4),
        "mask": torch.ones(2, 8, dtype=torch.bool),
        "temperature": 1.0,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        log_sum(**arguments)
