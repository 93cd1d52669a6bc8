"""The exit check in Triton against float64, against PyTorch in the same type, and at its edges."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exitserve_kernels.dispatch import Asked
from exitserve_kernels.exit_check import (
    CRITERIA,
    Criterion,
    ExitCheck,
    Head,
    finish,
    summarise_slice,
)

from .testing import assert_no_worse, poisoned_allocations

TYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(3, 40, 129), (33, 100, 517), (130, 32, 64)]


def exit_check(
    states: torch.Tensor,
    weight: torch.Tensor,
    thresholds: torch.Tensor,
    *,
    criterion: Criterion = "max_prob",
    end_thresholds: torch.Tensor | None = None,
    implementation: Asked = "auto",
    **head: Any,
) -> ExitCheck:
    """Both steps of a check, as the engine runs them on one rank; `head` is fields of `Head`."""
    whole = Head(weight, **head)
    return finish(
        summarise_slice(states, whole, implementation=implementation)[:, None],
        thresholds,
        criterion=criterion,
        vocab_size=whole.columns,
        end_thresholds=end_thresholds,
        implementation=implementation,
    )


def inputs(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, hidden, vocabulary = shape
    generator = torch.Generator().manual_seed(sum(shape))
    states = torch.randn(rows, hidden, generator=generator)
    weight = torch.randn(vocabulary, hidden, generator=generator) * hidden**-0.5 * 3
    thresholds = torch.rand(rows, generator=generator)
    return states.to(device, dtype), weight.to(device, dtype), thresholds.to(device)


def truth(states: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any) -> ExitCheck:
    """The reference with float32's products (its sums are exact enough beside bfloat16's)."""
    return exit_check(
        states.double(), weight.double(), *args, **{**options, "implementation": "torch"}
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers_are_those_of_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    states, weight, thresholds = inputs(shape, dtype, device)
    with poisoned_allocations():
        fused = exit_check(states, weight, thresholds, implementation="triton")
    plain = exit_check(states, weight, thresholds, implementation="torch")
    exact = truth(states, weight, thresholds)
    for name in ("top", "total", "confidence"):
        assert_no_worse(getattr(fused, name), getattr(plain, name), getattr(exact, name))
    clear = exact.confidence - thresholds
    sure = clear.abs() > 0.05
    assert torch.equal(fused.exits[sure], exact.exits[sure])
    assert torch.equal(fused.exits, fused.confidence > thresholds)
    # Equal up to ties that rounding makes: its logit is the greatest.
    logits = states.double() @ weight.double().T
    chosen = logits.gather(1, fused.token[:, None]).squeeze(1)
    assert float((logits.amax(1) - chosen).max()) <= (1e-5 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize(("criterion", "dtype"), [*zip(CRITERIA, TYPES, strict=True)], ids=str)
def test_every_option_at_once(criterion: str, dtype: torch.dtype, device: torch.device) -> None:
    # Many rows: with few, the ratio of two small errors is chance.
    states, weight, thresholds = inputs((150, 72, 333), dtype, device)
    torch.manual_seed(0)
    ends = torch.zeros(333, dtype=torch.bool, device=device)
    ends[::3] = True
    options: dict[str, Any] = {
        "criterion": criterion,
        "bias": torch.randn(333, device=device).to(dtype),
        "soft_cap": 5.0,
        "scale": 1.5,
        "vocab_size": 301,
        "ends": ends,
        "end_thresholds": thresholds * 0 + 0.9,
    }
    fused = exit_check(states, weight, thresholds, implementation="triton", **options)
    plain = exit_check(states, weight, thresholds, implementation="torch", **options)
    exact = truth(states, weight, thresholds, **options)
    for name in ("top", "total", "confidence"):
        assert_no_worse(getattr(fused, name), getattr(plain, name), getattr(exact, name))
    assert int(fused.token.max()) < 301
    own = torch.where(ends[fused.token], options["end_thresholds"], thresholds)
    assert torch.equal(fused.exits, fused.confidence > own)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.integers(1, 20),
    hidden=st.integers(1, 70),
    vocabulary=st.integers(1, 300),
    cuts=st.lists(st.integers(1, 299), max_size=3),
)
def test_slices_join_to_the_whole(
    device: torch.device, rows: int, hidden: int, vocabulary: int, cuts: list[int]
) -> None:
    states, weight, thresholds = inputs((rows, hidden, vocabulary), torch.float32, device)
    bounds = [0, *sorted({cut for cut in cuts if cut < vocabulary}), vocabulary]
    parts = torch.stack(
        [
            summarise_slice(
                states, Head(weight[start:end]), first_token=start, implementation="triton"
            )
            for start, end in pairwise(bounds)
        ],
        dim=1,
    )
    whole = exit_check(states, weight, thresholds, implementation="torch")
    joined = finish(parts, thresholds, vocab_size=vocabulary, implementation="triton")
    assert torch.equal(joined.token, whole.token)
    torch.testing.assert_close(joined.confidence, whole.confidence, rtol=1e-5, atol=1e-6)


def test_ties_go_to_the_first_token_in_one_tile_and_across_tiles(device: torch.device) -> None:
    states = torch.ones(2, 16, device=device)
    weight = torch.zeros(400, 16, device=device)
    weight[[5, 9, 300]] = 1.0
    for form in ("triton", "torch"):
        found = exit_check(
            states, weight, torch.zeros(2, device=device), criterion="margin", implementation=form
        )
        assert found.token.tolist() == [5, 5]
        # Three share the first place: the lead over the second is none.
        assert found.confidence.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("form", ["triton", "torch"])
def test_what_is_not_finite_never_exits(form: Any, device: torch.device) -> None:
    states, weight, _ = inputs((4, 32, 200), torch.float32, device)
    states[1, 3] = math.nan
    states[2, 5] = math.inf
    thresholds = torch.full((4,), -1.0, device=device)
    found = exit_check(states, weight, thresholds, implementation=form)
    assert found.exits.tolist() == [True, False, False, True]
    assert found.confidence.isnan().tolist() == [False, True, True, False]
    assert 0 <= int(found.token.min()) <= int(found.token.max()) < 200


@pytest.mark.parametrize("form", ["triton", "torch"])
def test_tokens_masked_with_minus_infinity_add_nothing(form: Any, device: torch.device) -> None:
    states, weight, thresholds = inputs((3, 32, 300), torch.float32, device)
    bias = torch.zeros(300, device=device)
    # A whole tile, and some tokens of another.
    bias[:140] = -math.inf
    for criterion in CRITERIA:
        masked = exit_check(
            states, weight, thresholds, bias=bias, criterion=criterion, implementation=form
        )
        few = exit_check(
            states, weight[140:], thresholds, criterion=criterion, implementation="torch"
        )
        assert torch.equal(masked.token, few.token + 140)
        scale = math.log(160) / math.log(300) if criterion == "entropy" else 1.0
        expected = 1.0 - (1.0 - few.confidence) * scale if criterion == "entropy" else None
        torch.testing.assert_close(
            masked.confidence,
            few.confidence if expected is None else expected,
            rtol=1e-5,
            atol=1e-6,
        )
    nothing = exit_check(
        states, weight, thresholds, bias=bias * math.inf + -math.inf, implementation=form
    )
    assert nothing.confidence.isnan().all()
    assert not nothing.exits.any()


@pytest.mark.parametrize("form", ["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_kept_where_a_sampler_wants_them(
    form: Any, dtype: torch.dtype, device: torch.device
) -> None:
    states, weight, _ = inputs((5, 48, 260), dtype, device)
    head = Head(weight, soft_cap=3.0, vocab_size=250, rounded=True)
    wide = torch.full((5, 300), math.nan, dtype=dtype, device=device)
    own = summarise_slice(states, head, logits=wide[:, :250], implementation=form)
    assert wide[:, 250:].isnan().all()
    exact = torch.tanh(states.double() @ weight.double().T / 3.0) * 3.0
    plain = torch.empty(5, 250, dtype=dtype, device=device)
    summarise_slice(states, head, logits=plain, implementation="torch")
    assert_no_worse(wide[:, :250], plain, exact[:, :250])
    # The check reads the logits that are kept.
    assert torch.equal(own[:, 0], wide[:, :250].float().amax(1))


def test_empty_batch(device: torch.device) -> None:
    _, weight, _ = inputs((1, 24, 150), torch.float32, device)
    found = exit_check(
        weight.new_empty(0, 24), weight, weight.new_empty(0), implementation="triton"
    )
    assert [part.shape for part in found] == [(0,)] * 5


def test_strided_inputs(device: torch.device) -> None:
    states, weight, thresholds = inputs((6, 48, 210), torch.float32, device)
    expected = exit_check(states, weight, thresholds, implementation="triton")
    apart = torch.full((12, 96), math.nan, device=device)[::2, ::2]
    apart.copy_(states)
    turned = weight.T.contiguous().T
    found = exit_check(
        apart, turned, thresholds[:, None].expand(6, 3)[:, 1], implementation="triton"
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_runs_in_a_cuda_graph(device: torch.device) -> None:
    states, weight, thresholds = inputs((8, 64, 1000), torch.bfloat16, device)
    expected = exit_check(states, weight, thresholds, implementation="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = exit_check(states, weight, thresholds, implementation="triton")
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
