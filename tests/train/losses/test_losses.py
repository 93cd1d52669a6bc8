"""Each loss against its reference, in the regimes in which such code goes wrong."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from exitserve_training.losses import headless, pairs

from .table import CASES, VOCAB, WIDTH, Case

ROWS, TOKENS = 3, 8
every_loss = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def problem(
    dtype: torch.dtype, offset: float = 0.5, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """States with a common part, as trained models have; labels that repeat; a mask."""
    drawn = torch.Generator().manual_seed(seed)
    common = offset * torch.randn(WIDTH, generator=drawn, dtype=dtype)
    z = torch.randn(ROWS, TOKENS, WIDTH, generator=drawn, dtype=dtype) + common
    labels = torch.randint(VOCAB, (ROWS, TOKENS), generator=drawn)
    mask = torch.rand(ROWS, TOKENS, generator=drawn) < 0.7
    mask[:, :4] = True
    return z.requires_grad_(), labels, mask


def value_and_gradient(loss: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    # A factor, as of a weighted sum of losses: a gradient made in forward must take it.
    (gradient,) = torch.autograd.grad(-2.5 * loss, z)
    return loss.detach(), gradient


def blocks(patch: pytest.MonkeyPatch, rows: int) -> None:
    patch.setattr(pairs, "ROWS", rows)
    patch.setattr(headless, "BLOCK_ROWS", rows)


@every_loss
@pytest.mark.parametrize(("offset", "rows"), [(0.5, 3), (4.0, 256)], ids=["blocks", "condensed"])
def test_value_and_gradient_equal_the_reference(
    case: Case, offset: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With masked tokens, in blocks of which the last is shorter, and in one."""
    blocks(monkeypatch, rows)
    z, labels, mask = problem(case.dtype, offset)
    ours = value_and_gradient(case.ours(z, labels, mask), z)
    expected = case.reference(z, labels, mask)
    theirs = value_and_gradient(expected, z)
    torch.testing.assert_close(ours, theirs, **case.close, check_dtype=False)


@every_loss
def test_uncounted_tokens_may_hold_anything(case: Case) -> None:
    z, labels, mask = problem(torch.float32)
    value, gradient = value_and_gradient(case.ours(z, labels, mask), z)
    spoiled = z.detach().masked_fill(~mask[..., None], math.nan).requires_grad_()
    found, its_gradient = value_and_gradient(case.ours(spoiled, labels, mask), spoiled)
    torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)
    # Gradients of temperature 0.01 are 100 times as large.
    torch.testing.assert_close(its_gradient[mask], gradient[mask], rtol=1e-3, atol=1e-3)


@every_loss
def test_without_anything_to_compare_a_loss_is_zero(case: Case) -> None:
    z, labels, mask = problem(torch.float32)
    nothing = torch.zeros_like(mask)
    one_token = nothing.clone()
    one_token[0, 0] = True
    for counted in [nothing, one_token] if case.needs_pairs else [nothing]:
        value, gradient = value_and_gradient(case.ours(z, labels, counted), z)
        assert value.item() == 0.0
        assert gradient.count_nonzero() == 0


DEGENERATE = {
    "zero": lambda z: z * 0.0,
    "some zero": lambda z: z * (torch.arange(TOKENS) % 3 > 0)[:, None],
    "equal": lambda z: z[:1, :1].expand(ROWS, TOKENS, WIDTH).clone(),
    "opposite": lambda z: torch.cat([z[:, :4], -z[:, :4]], dim=1),
    "huge": lambda z: z * 1e30,
    "tiny": lambda z: z * 1e-30,
    "denormal": lambda z: z * 1e-40,
    "huge and tiny": lambda z: z * torch.tensor([1e30, 1.0, 1e-6, 1e-30, 1.0, 1.0]),
    "float16": lambda z: z.half(),
    "bfloat16": lambda z: z.bfloat16(),
}


@every_loss
def test_degenerate_states_are_finite_in_value_and_gradient(case: Case) -> None:
    z, labels, mask = problem(torch.float32)
    for kind, made in DEGENERATE.items():
        states = made(z.detach()).requires_grad_()
        value, gradient = value_and_gradient(case.ours(states, labels, mask), states)
        assert value.dtype == torch.float32, kind
        assert value.isfinite(), kind
        assert gradient.isfinite().all(), kind


@every_loss
def test_half_precision_is_summed_in_float32(case: Case) -> None:
    """Of the numbers as they are rounded; autocast changes nothing."""
    z, labels, mask = problem(torch.float32)
    half = z.detach().bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = case.ours(half, labels, mask)
    expected = case.ours(half.float(), labels, mask)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=case.half, atol=0.0)


@every_loss
def test_no_matrix_of_pairs_is_kept_for_backward(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks(monkeypatch, 16)
    z = torch.randn(2, 64, WIDTH, requires_grad=True)
    labels = torch.arange(128).reshape(2, 64) % VOCAB
    kept: list[int] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved.numel())
        return saved

    with saved_tensors_hooks(keep, lambda saved: saved):
        case.ours(z, labels, torch.ones_like(labels, dtype=torch.bool)).backward()
    assert max(kept) < 2 * 16 * 64
