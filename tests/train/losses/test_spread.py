"""The dispersion losses against the pair-by-pair references they must equal."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from exitserve.errors import ExitServeError
from exitserve_training.losses import spread as module
from exitserve_training.losses.measures import mean_cosine
from exitserve_training.losses.reference import spread
from exitserve_training.losses.spread import (
    decorrelation,
    dispersion,
    l2_repel,
    orthogonalization,
)

# Both sides are float32. A cosine is off by about 1e-7, its angle by 1e-7 / sin(angle), which in
# the clouds below is at most a few 1e-6; sums over pairs add rounding errors of 1e-7 relative.
CLOSE = {"rtol": 5e-5, "atol": 5e-6}

Loss = Callable[..., Tensor]
LOSSES: dict[str, tuple[Loss, Loss]] = {
    "dispersion": (dispersion, spread.dispersion),
    "orthogonalization": (orthogonalization, spread.orthogonalization),
    "l2_repel": (l2_repel, spread.l2_repel),
    "decorrelation": (decorrelation, spread.decorrelation),
    "l2_repel, without self-pairs": (
        functools.partial(l2_repel, self_pairs=False),
        functools.partial(spread.l2_repel, self_pairs=False),
    ),
    "decorrelation, features": (
        functools.partial(decorrelation, between="features"),
        functools.partial(spread.decorrelation, between="features"),
    ),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of 3 rows, so that small clouds have several and a shorter last one."""
    monkeypatch.setattr(module, "BLOCK_ROWS", 3)
    yield


def cloud(
    rows: int = 2,
    tokens: int = 8,
    width: int = 5,
    *,
    seed: int = 0,
    offset: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Normal vectors; with a large offset they lie in a narrow cone."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(rows, tokens, width, generator=generator, dtype=dtype) + offset
    return z.requires_grad_()


def some_mask(rows: int, tokens: int, seed: int = 0) -> Tensor:
    """Two tokens or more of each row."""
    mask = torch.rand(rows, tokens, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[:, :2] = True
    return mask


def value_and_gradient(loss: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    (gradient,) = torch.autograd.grad(loss, z)
    return loss.detach(), gradient


@every_loss
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("offset", [0.0, 5.0])
@pytest.mark.parametrize("shape", [(1, 2, 3), (2, 8, 5), (3, 7, 4)])
@pytest.mark.usefixtures("small_blocks")
def test_value_and_gradient_equal_the_reference(
    name: str, masked: bool, offset: float, shape: tuple[int, int, int]
) -> None:
    loss, reference = LOSSES[name]
    z = cloud(*shape, offset=offset)
    mask = some_mask(*shape[:2]) if masked else None
    ours = value_and_gradient(loss(z, mask=mask), z)
    theirs = value_and_gradient(reference(z, mask=mask), z)
    torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("name", ["dispersion", "l2_repel"])
def test_temperature_is_the_reference_s(name: str, temperature: float) -> None:
    loss, reference = LOSSES[name]
    z = cloud()
    ours = value_and_gradient(loss(z, temperature=temperature), z)
    theirs = value_and_gradient(reference(z, temperature=temperature), z)
    torch.testing.assert_close(ours, theirs, **CLOSE)


def test_norm_weight_and_margin_are_the_reference_s() -> None:
    z = cloud()
    ours = value_and_gradient(l2_repel(z, norm_weight=1.5), z)
    theirs = value_and_gradient(spread.l2_repel(z, norm_weight=1.5), z)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    ours = value_and_gradient(orthogonalization(z, margin=0.7), z)
    theirs = value_and_gradient(spread.orthogonalization(z, margin=0.7), z)
    torch.testing.assert_close(ours, theirs, **CLOSE)


@every_loss
@pytest.mark.usefixtures("small_blocks")
def test_gradcheck(name: str) -> None:
    z = cloud(2, 5, 3, seed=3, dtype=torch.float64)
    mask = torch.tensor([[True] * 5, [True, True, False, True, True]])
    assert torch.autograd.gradcheck(lambda z: LOSSES[name][0](z, mask=mask), (z,))


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_dispersion_by_hand(temperature: float) -> None:
    orthogonal = torch.eye(3)[None]
    assert dispersion(orthogonal, temperature=temperature).item() == pytest.approx(
        -0.5 / temperature
    )
    # Of the 6 pairs of four directions of the plane, 4 are orthogonal and 2 opposite.
    square = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]])
    expected = math.log((4 * math.exp(-0.5 / temperature) + 2 * math.exp(-1 / temperature)) / 6)
    # Cutting the cosine at 1e-6 takes 4.5e-4 from the distance of opposite vectors.
    found = dispersion(square, temperature=temperature).item()
    assert found == pytest.approx(expected, abs=4.6e-4 / temperature)


def test_orthogonalization_by_hand() -> None:
    sixty = torch.tensor([[[1.0, 0.0], [1.0, math.sqrt(3.0)]]])
    assert orthogonalization(sixty).item() == pytest.approx((1 / 2 - 1 / 3) ** 2)
    obtuse = torch.tensor([[[1.0, 0.0], [-1.0, 0.5]]], requires_grad=True)
    value, gradient = value_and_gradient(orthogonalization(obtuse), obtuse)
    assert value.item() == 0.0
    assert gradient.count_nonzero() == 0


def test_l2_repel_by_hand() -> None:
    z = torch.tensor([[[0.0, 0.0], [3.0, 4.0]]])
    norm = 0.1 * (9 + 16) / 4
    # Of four ordered pairs two are a token with itself.
    expected = math.log((2 + 2 * math.exp(-25 / 5)) / 4)
    assert l2_repel(z, temperature=5.0).item() == pytest.approx(expected + norm)
    distinct = l2_repel(z, temperature=5.0, self_pairs=False)
    assert distinct.item() == pytest.approx(-25 / 5 + norm)


def test_decorrelation_of_tokens_by_hand() -> None:
    x = torch.tensor([-1.0, -1.0, 1.0, 1.0])
    y = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    # Of the three pairs (x, 2x + 7), (x, y), (2x + 7, y) the first alone is correlated.
    assert decorrelation(torch.stack([x, 2 * x + 7, y])[None]).item() == pytest.approx(1 / 3)


def test_decorrelation_of_features_by_hand() -> None:
    x = torch.tensor([-1.0, -1.0, 1.0, 1.0])
    y = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    # Of the three pairs (x, 2x + 7), (x, y), (2x + 7, y) the first alone is correlated.
    z = torch.stack([x, 2 * x + 7, y], dim=-1)[None]
    assert decorrelation(z, between="features").item() == pytest.approx(1 / 3)


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(sorted(LOSSES)),
    tokens=st.integers(2, 12),
    block=st.integers(1, 13),
    seed=st.integers(0, 2**16),
)
def test_any_order_of_tokens_any_block_any_mask(
    name: str, tokens: int, block: int, seed: int
) -> None:
    loss = LOSSES[name][0]
    z = cloud(2, tokens, 4, seed=seed).detach()
    mask = some_mask(2, tokens, seed)
    expected = loss(z, mask=mask)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(loss(z[:, order], mask=mask[:, order]), expected, **CLOSE)
    dropped = torch.stack([loss(row[kept][None]) for row, kept in zip(z, mask, strict=True)])
    torch.testing.assert_close(dropped.mean(), expected, **CLOSE)
    torch.testing.assert_close(dropped, loss(z, mask=mask, reduction="none"), **CLOSE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_ROWS", block)
        leaf = z.clone().requires_grad_()
        in_blocks = value_and_gradient(loss(leaf, mask=mask), leaf)
    whole = value_and_gradient(loss(leaf, mask=mask), leaf)
    torch.testing.assert_close(in_blocks, whole, **CLOSE)


@settings(deadline=None, max_examples=30)
@given(exponent=st.integers(-3, 30), seed=st.integers(0, 2**16))
def test_only_directions_matter_to_angles(exponent: int, seed: int) -> None:
    z = cloud(seed=seed).detach()
    scales = 10.0**exponent * (1.0 + torch.rand(2, 8, 1))
    for loss in (dispersion, orthogonalization):
        torch.testing.assert_close(loss(z * scales), loss(z), **CLOSE)


@settings(deadline=None, max_examples=30)
@given(exponent=st.integers(-3, 30), shift=st.floats(-3, 3), seed=st.integers(0, 2**16))
def test_decorrelation_knows_no_scale_or_origin(exponent: int, shift: float, seed: int) -> None:
    z = cloud(seed=seed).detach()
    scales = 10.0**exponent * (1.0 + torch.rand(5))
    # A shift of up to three times the spread costs half a digit of it.
    loss = functools.partial(decorrelation, between="features")
    torch.testing.assert_close(loss((z + shift) * scales), loss(z), **CLOSE)
    per_token = scales[None, :, None].expand(2, 5, 1)
    z = z[:, :5]
    found = decorrelation((z + shift) * per_token)
    torch.testing.assert_close(found, decorrelation(z), **CLOSE)


@pytest.mark.parametrize("constant", [1000.1, 1e37, 1e-7, 0.0])
def test_a_constant_feature_is_correlated_with_none(constant: float) -> None:
    z = cloud(1, 7, 3)
    with_constant = torch.cat([z, torch.full((1, 7, 1), constant)], dim=-1)
    with_constant = with_constant.detach().requires_grad_()
    loss = functools.partial(decorrelation, between="features")
    value, gradient = value_and_gradient(loss(with_constant), with_constant)
    # 3 of the 6 pairs are without the constant.
    torch.testing.assert_close(value, loss(z.detach()) * 3 / 6, **CLOSE)
    assert gradient[..., 3].count_nonzero() == 0
    turned = with_constant.detach().mT.requires_grad_()
    value, gradient = value_and_gradient(decorrelation(turned), turned)
    torch.testing.assert_close(value, loss(z.detach()) * 3 / 6, **CLOSE)
    assert gradient[:, 3].count_nonzero() == 0


@settings(deadline=None, max_examples=30)
@given(shift=st.floats(-100, 100), seed=st.integers(0, 2**16))
def test_repulsion_does_not_change_when_all_tokens_move(shift: float, seed: int) -> None:
    z = cloud(seed=seed).detach()
    repel = functools.partial(l2_repel, norm_weight=0.0, self_pairs=False)
    # z + 100 keeps 1.7 digits less of z: 4e-6 absolute, squared distances of up to 60.
    torch.testing.assert_close(repel(z + shift), repel(z), rtol=1e-4, atol=1e-3)


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(2, 9),
    scale=st.floats(1e-3, 1e3),
    temperature=st.floats(0.1, 10),
    seed=st.integers(0, 2**16),
)
def test_bounds(tokens: int, scale: float, temperature: float, seed: int) -> None:
    z = cloud(1, tokens, 4, seed=seed).detach() * scale
    assert -1.0 / temperature <= dispersion(z, temperature=temperature) <= 1e-6
    assert 0.0 <= orthogonalization(z) <= 0.25
    assert 0.0 <= decorrelation(z) <= 1.0 + 1e-6
    assert 0.0 <= decorrelation(z, between="features") <= 1.0 + 1e-6
    assert l2_repel(z, temperature=temperature) >= -math.log(tokens) - 1e-6
    bounding = 2 * 4 * tokens / ((tokens - 1) * temperature)
    size = z.square().mean().item() * bounding
    # Two numbers of this size are subtracted.
    distinct = l2_repel(z, temperature=temperature, norm_weight=bounding, self_pairs=False)
    assert distinct >= -1e-5 * (1.0 + size)


DEGENERATE: dict[str, Callable[[Tensor], Tensor]] = {
    "one token": lambda z: z[:, :1],
    "one feature": lambda z: z[..., :1],
    "all equal": lambda z: z[:1, :1].expand(2, 6, 4),
    "two equal": lambda z: z[:, [0, 1, 2, 1, 4, 5]],
    "opposite": lambda z: torch.cat([z, -z], dim=1),
    "zero token": lambda z: z * (torch.arange(6) != 2)[:, None],
    "all zero": torch.zeros_like,
    "huge": lambda z: z * 1e37,
    "tiny": lambda z: z * 1e-30,
    "denormal": lambda z: z * 1e-40,
    "huge and tiny": lambda z: z * torch.tensor([1e30, 1.0, 1e-6, 1e-30]),
    "nearly equal": lambda z: z[:1, :1] + z * 1e-6,
    "float16": lambda z: z.half(),
    "float16 small": lambda z: (z * 1e-5).half(),
    "bfloat16": lambda z: z.bfloat16(),
}


@every_loss
@pytest.mark.parametrize("kind", DEGENERATE)
@pytest.mark.usefixtures("small_blocks")
def test_degenerate_states_are_finite_in_value_and_gradient(name: str, kind: str) -> None:
    z = DEGENERATE[kind](cloud(2, 6, 4).detach()).clone().requires_grad_()
    value, gradient = value_and_gradient(LOSSES[name][0](z), z)
    assert value.dtype == torch.float32
    assert value.isfinite()
    assert gradient.isfinite().all()
    assert gradient.dtype == z.dtype


@every_loss
@pytest.mark.parametrize("kind", ["one token", "nothing counted", "one counted"])
@pytest.mark.usefixtures("small_blocks")
def test_without_a_pair_the_loss_is_zero_with_zero_gradient(name: str, kind: str) -> None:
    z = cloud(2, 1 if kind == "one token" else 7)
    mask = torch.zeros(z.shape[:2], dtype=torch.bool)
    mask[:, 0] = kind != "nothing counted"
    loss = LOSSES[name][0]
    value, gradient = value_and_gradient(loss(z, mask=mask), z)
    assert value.item() == 0.0
    assert gradient.count_nonzero() == 0
    assert torch.equal(loss(z, mask=mask, reduction="none"), torch.zeros(2))


@every_loss
def test_uncounted_tokens_may_hold_anything(name: str) -> None:
    z = cloud(2, 6, 4)
    mask = some_mask(2, 6)
    mask[1, 1:] = False  # one token only: left out of the mean
    spoiled = z.detach().masked_fill(~mask[..., None], math.nan).requires_grad_()
    value, gradient = value_and_gradient(LOSSES[name][0](spoiled, mask=mask), spoiled)
    expected, expected_gradient = value_and_gradient(LOSSES[name][1](z, mask=mask), z)
    torch.testing.assert_close(value, expected, **CLOSE)
    torch.testing.assert_close(gradient, expected_gradient, **CLOSE)


@every_loss
def test_half_precision_states_are_computed_in_float32(name: str) -> None:
    z = cloud().detach().bfloat16()
    loss = LOSSES[name][0]
    assert torch.equal(loss(z), loss(z.float()))


@every_loss
def test_autocast_changes_nothing(name: str) -> None:
    z = cloud(offset=5.0)
    loss = LOSSES[name][0]
    expected = value_and_gradient(loss(z), z)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(z)
    found = value_and_gradient(value, z)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


class Largest(TorchDispatchMode):
    """Remembers the numel of the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"decorrelation, features"}))
def test_one_block_of_pairs_at_a_time(name: str) -> None:
    z = cloud(2, 4 * module.BLOCK_ROWS, 4)
    with Largest() as largest:
        LOSSES[name][0](z).backward()
    assert largest.numel == 2 * module.BLOCK_ROWS * 4 * module.BLOCK_ROWS


@every_loss
def test_backward_computes_the_pairs_again(name: str) -> None:
    z = cloud(2, 512, 16)
    kept: list[int] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved.numel())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        loss = LOSSES[name][0](z)
    assert loss.requires_grad
    assert max(kept) <= z.numel()


def test_decorrelation_of_features_has_no_pairs_of_tokens() -> None:
    z = cloud(2, 1024, 8)
    with Largest() as largest:
        decorrelation(z, between="features").backward()
    assert largest.numel == z.numel()


def descended(loss: Loss, tokens: int, width: int, steps: int) -> tuple[Tensor, float]:
    """A condensed cloud, and the loss, after so many steps down it."""
    generator = torch.Generator().manual_seed(1)
    common = 4.0 * torch.randn(width, generator=generator)
    z = (torch.randn(1, tokens, width, generator=generator) + common).requires_grad_()
    assert mean_cosine(z) > 0.85
    optimizer = torch.optim.Adam([z], lr=0.3)
    value = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(z)
        value.backward()
        optimizer.step()
    return z.detach(), value.item()


def test_dispersion_opens_a_cone() -> None:
    """What the loss is for: descending it lowers the mean cosine of condensed states."""
    assert mean_cosine(descended(dispersion, 24, 8, 40)[0]) < 0.1


def test_decorrelation_of_tokens_opens_a_cone_and_of_features_does_not() -> None:
    assert mean_cosine(descended(decorrelation, 32, 16, 80)[0]) < 0.25
    features = functools.partial(decorrelation, between="features")
    opened, value = descended(features, 32, 16, 80)
    assert value < 1e-3
    assert mean_cosine(opened) > 0.6


def test_self_pairs_keep_repelled_states_in_bounds() -> None:
    opened, value = descended(l2_repel, 24, 16, 80)
    assert mean_cosine(opened) < 0.05
    assert opened.abs().max() < 4.0
    assert -math.log(24) <= value < 0.5
    runaway = functools.partial(l2_repel, self_pairs=False)
    grown, value = descended(runaway, 24, 16, 80)
    assert value < -1000.0
    assert grown.abs().max() > 10.0


@pytest.mark.parametrize(
    ("loss", "change", "message"),
    [
        (dispersion, {"temperature": 0.0}, "temperature 0.0 must be a finite number, greater"),
        (dispersion, {"temperature": math.nan}, "temperature nan"),
        (l2_repel, {"temperature": -1.0}, "temperature -1.0"),
        (l2_repel, {"norm_weight": -0.1}, "norm_weight -0.1 must be a finite number, at least 0"),
        (orthogonalization, {"margin": 1.5}, r"margin 1.5 must lie in 0\.\.1"),
        (decorrelation, {"reduction": "man"}, "reduction 'man' is unknown.*Did you mean 'mean'"),
        (decorrelation, {"between": "token"}, "between 'token' is unknown.*mean 'tokens'"),
        (decorrelation, {"mask": torch.ones(2, 3)}, r"mask has shape \(2, 3\)"),
    ],
)
def test_bad_arguments_are_named(loss: Loss, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ExitServeError, match=message):
        loss(cloud(), **change)


@every_loss
def test_states_must_be_rows_of_tokens(name: str) -> None:
    with pytest.raises(ExitServeError, match=r"shape \(8, 5\); expected \[B, T, D\]"):
        LOSSES[name][0](cloud()[0])
    with pytest.raises(ExitServeError, match="none of them 0"):
        LOSSES[name][0](cloud()[:, :0])
