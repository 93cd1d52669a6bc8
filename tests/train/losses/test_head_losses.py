"""Losses with gradients made in the forward pass, against plain autograd."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from exitserve.errors import ExitServeError
from exitserve_kernels.logit_losses import in_place
from exitserve_training.losses import OutputHead, Reading, Teacher, head_losses, head_pass

# Both sides are float32 and differ in summation order only (chunks of tokens, then layers): a
# few rounding errors of 1.2e-7 relative over sums of at most a few hundred terms.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}

# bf16 keeps 8 bits, so every product is off by up to 2^-8 of its terms. Both sides round, not
# at the same places: 2^-8 twice, of the largest entry since terms of both signs cancel.
BFLOAT16 = 2**-7

WIDTH, VOCAB = 8, 19


def a_head(
    *, soft_cap: float | None = None, bias: bool = True, width: int = WIDTH, vocab: int = VOCAB
) -> OutputHead:
    torch.manual_seed(1)
    norm = nn.RMSNorm(width)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    return OutputHead(norm, nn.Linear(width, vocab, bias=bias), soft_cap)


def some_tokens(
    count: int, seed: int = 0, width: int = WIDTH, vocab: int = VOCAB
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, labels, and weights of which some are 0."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, width, generator=generator).requires_grad_()
    labels = torch.randint(vocab, (count,), generator=generator)
    scale = torch.rand(count, generator=generator) - 0.3
    return hidden, labels, scale.clamp_min(0.0)


def cross_entropy(
    hidden: Tensor, head: OutputHead, labels: Tensor, scale: Tensor, chunk_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Of one reading: the weighted sum, and each token's."""
    total, (losses,) = head_losses(
        [Reading(hidden, labels, scale)], head, chunk_tokens=chunk_tokens
    )
    assert losses.cross_entropy is not None
    return total, losses.cross_entropy


def plain(hidden: Tensor, head: OutputHead, labels: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """All logits at once, the definition as it stands."""
    losses = functional.cross_entropy(head(hidden), labels, reduction="none")
    return (losses * scale).sum(), losses


def leaves(head: OutputHead, *hidden: Tensor) -> list[Tensor]:
    return [*hidden, *head.norm.parameters(), *head.linear.parameters()]


def gradients(loss: Tensor, of: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, of, materialize_grads=True))


def assert_all_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for mine, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.detach(), truth.detach(), **CLOSE)


def assert_all_near(found: list[Tensor], expected: list[Tensor], bound: float) -> None:
    """Errors relative to the largest entry."""
    for mine, truth in zip(found, expected, strict=True):
        error = (mine.float() - truth.float()).abs().max().item()
        assert error <= bound * truth.abs().max().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
def test_weights_in_half_precision(
    dtype: torch.dtype, soft_cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several slices of a chunk, and several blocks of the weight, none of them even.
    monkeypatch.setattr(in_place, "_SLICE_ELEMENTS", 7 * 300 + 1)
    monkeypatch.setattr(head_pass, "_BLOCK_ROWS", 128)
    head = a_head(soft_cap=soft_cap, width=64, vocab=300)
    hidden, labels, scale = some_tokens(50, width=64, vocab=300)
    head.norm.to(dtype)
    head.linear.to(dtype)
    states = hidden.detach().to(dtype).requires_grad_()
    total, _ = cross_entropy(states, head, labels, scale, chunk_tokens=16)
    ours = gradients(total, leaves(head, states))
    assert total.dtype == torch.float32
    assert all(gradient.dtype == dtype for gradient in ours)
    head.norm.float()
    head.linear.float()
    exact = states.detach().float().requires_grad_()
    expected, _ = plain(exact, head, labels, scale)
    truth = gradients(expected, leaves(head, exact))
    assert_all_near([total, *ours], [expected, *truth], BFLOAT16)


def test_large_logits_stay_finite() -> None:
    head = a_head()
    hidden, labels, scale = some_tokens(12)
    with torch.no_grad():
        head.linear.weight.mul_(1e4)
    total, losses = cross_entropy(hidden, head, labels, scale)
    expected, each = plain(hidden, head, labels, scale)
    assert head(hidden).abs().max() > 1e4
    assert bool(losses.isfinite().all())
    assert_all_close([losses], [each])
    # Logits of 1e4 are known to 1e-3, and so are the probabilities of near-ties.
    ours, truth = (gradients(loss, leaves(head, hidden)) for loss in (total, expected))
    assert_all_near(ours, truth, 2e-3)


@pytest.mark.parametrize("frozen", ["weight", "bias", "norm", "hidden"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(frozen: str) -> None:
    head = a_head()
    hidden, labels, scale = some_tokens(11)
    named = {"norm": head.norm.weight, "hidden": hidden, **dict(head.linear.named_parameters())}
    still = named[frozen]
    still.requires_grad_(False)
    cross_entropy(hidden, head, labels, scale, chunk_tokens=4)[0].backward()
    assert still.grad is None
    rest = [leaf for leaf in leaves(head, hidden) if leaf.requires_grad]
    expected = gradients(plain(hidden, head, labels, scale)[0], rest)
    assert_all_close([leaf.grad for leaf in rest if leaf.grad is not None], expected)


def test_tied_embedding_gets_both_gradients() -> None:
    head = a_head(bias=False)
    _, labels, scale = some_tokens(15)

    def run(loss: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        states = functional.embedding(labels.flip(0), head.linear.weight)
        return gradients(loss(states, head, labels, scale)[0], leaves(head))

    assert_all_close(run(cross_entropy), run(plain))


class Watch(TorchDispatchMode):
    """Counts matrix products; notes size, dtype and place of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.made: set[tuple[int, torch.dtype, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket.__name__ in ("mm", "addmm", "addmm_")
        for value in out if isinstance(out, (tuple, list)) else (out,):
            # A part of something larger takes no memory of its own.
            if isinstance(value, Tensor) and value.untyped_storage().nbytes() == value.nbytes:
                place = value.untyped_storage().data_ptr()
                self.made.add((value.numel(), value.dtype, place))
        return out


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("chunk", [5, 40])
def test_one_chunk_of_logits_and_one_sum_of_the_weight_are_all_that_is_large(
    chunk: int, autocast: bool
) -> None:
    """The memory claim, forward and backward, with several layers through one head."""
    width, vocab, count = 24, 100, 33
    head = a_head(width=width, vocab=vocab, bias=False)
    weight = head.linear.weight
    readings = [Reading(*some_tokens(count, seed, width, vocab)) for seed in range(3)]
    with Watch() as watch, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        head_losses(readings, head, chunk_tokens=chunk)[0].backward()
    largest = max(size for size, _, _ in watch.made)
    assert largest == max(min(chunk, count) * vocab, width * vocab)
    sums = {
        place
        for size, dtype, place in watch.made
        if size == width * vocab and dtype == torch.float32
    }
    assert weight.grad is not None
    assert sums - {weight.data_ptr()} == {weight.grad.data_ptr()}, "no copy on the way to .grad"


def test_a_head_that_is_more_than_linear_is_refused() -> None:
    class Adapted(nn.Linear):
        """What quantisation does to a layer."""

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 1.5

    hidden, labels, scale = some_tokens(6)
    head = OutputHead(nn.RMSNorm(WIDTH), Adapted(WIDTH, VOCAB))
    with pytest.raises(ExitServeError, match=r"the head is a Adapted.*nn\.Linear itself"):
        cross_entropy(hidden, head, labels, scale)


# --- several layers and a teacher -----------------------------------------------------------


def layers_and_teacher(
    count: int, layers: int, seed: int, soft_cap: float | None, temperature: float
) -> tuple[list[Reading], OutputHead, Teacher]:
    """Layers with cross-entropy, a divergence or both, whose counted tokens differ."""
    generator = torch.Generator().manual_seed(seed)
    head, other = a_head(soft_cap=soft_cap), a_head(soft_cap=soft_cap, width=WIDTH + 1)
    readings = []
    for layer in range(layers):
        hidden, labels, scale = some_tokens(count, seed + layer)
        rows = None
        if layer % 2:
            rows = (torch.rand(count, generator=generator) < 0.6).nonzero().squeeze(-1)
        chosen = slice(None) if rows is None else rows
        readings.append(
            Reading(
                hidden,
                labels[chosen] if layer % 3 != 1 else None,
                scale[chosen] if layer % 3 != 1 else None,
                scale.flip(0)[chosen] if layer % 3 else None,
                rows,
            )
        )
    states = torch.randn(count, WIDTH + 1, generator=generator)
    return readings, head, Teacher(states, other, temperature)


def plainly(readings: list[Reading], head: OutputHead, teacher: Teacher) -> Tensor:
    """All logits at once, by torch's own losses."""
    total = torch.zeros(())
    for reading in readings:
        rows = slice(None) if reading.rows is None else reading.rows
        logits = head(reading.hidden[rows])
        if reading.labels is not None:
            losses = functional.cross_entropy(logits, reading.labels, reduction="none")
            total = total + (losses * reading.cross_entropy).sum()
        if reading.divergence is not None:
            with torch.no_grad():
                taught = teacher.head(teacher.hidden[rows]) / teacher.temperature
            pair = (torch.log_softmax(one, -1) for one in (logits / teacher.temperature, taught))
            each = functional.kl_div(*pair, reduction="none", log_target=True).sum(-1)
            total = total + (each * reading.divergence).sum()
    return total


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(0, 25),
    layers=st.integers(1, 4),
    chunk=st.integers(1, 30),
    soft_cap=st.sampled_from([None, 0.7]),
    temperature=st.sampled_from([1.0, 2.5]),
    seed=st.integers(0, 2**16),
)
def test_layers_and_a_teacher_equal_the_full_logit_computation(
    count: int, layers: int, chunk: int, soft_cap: float | None, temperature: float, seed: int
) -> None:
    readings, head, teacher = layers_and_teacher(count, layers, seed, soft_cap, temperature)
    total, _ = head_losses(readings, head, teacher, chunk_tokens=chunk)
    expected = plainly(readings, head, teacher)
    of = leaves(head, *[reading.hidden for reading in readings])
    assert_all_close([total], [expected])
    if expected.requires_grad:
        assert_all_close(gradients(total, of), gradients(expected, of))


def test_the_teacher_is_asked_once_a_chunk_whatever_number_of_layers() -> None:
    """And makes no products in backward: 1 of the teacher and 3 of each layer for each chunk."""
    hidden, labels, scale = some_tokens(10)
    head, chunks, layers = a_head(bias=False), 2, 3
    readings = [Reading(hidden, labels, scale, scale) for _ in range(layers)]
    teacher = Teacher(hidden.detach(), a_head(bias=False))
    with Watch() as watch:
        head_losses(readings, head, teacher, chunk_tokens=5)[0].backward()
    assert watch.products == chunks * (1 + 3 * layers)
