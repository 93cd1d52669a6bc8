"""The cosine and the KL alignment of layers against their definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from exitserve.errors import ExitServeError
from exitserve_training.layer_weights import layer_weights
from exitserve_training.losses import OutputHead
from exitserve_training.losses.last_layer import cosine_alignment, kl_to_last
from exitserve_training.losses.reference import last_layer as reference

# Both sides are float32 and differ in summation order only (features, then tokens, then layers):
# a few rounding errors of 1.2e-7 relative on numbers of size 1.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def problem(
    layers: int = 4, rows: int = 2, tokens: int = 5, width: int = 6, vocab: int = 11, seed: int = 0
) -> tuple[list[Tensor], OutputHead]:
    generator = torch.Generator().manual_seed(seed * 1000 + layers * 10 + tokens)
    hidden = [
        torch.randn(rows, tokens, width, generator=generator).requires_grad_()
        for _ in range(layers)
    ]
    torch.manual_seed(1)
    return hidden, OutputHead(nn.RMSNorm(width), nn.Linear(width, vocab, bias=False))


def reading_as_it_is(width: int) -> OutputHead:
    """A head whose logits are the states."""
    linear = nn.Linear(width, width, bias=False)
    nn.init.eye_(linear.weight)
    return OutputHead(nn.Identity(), linear)


def parameters(head: OutputHead) -> list[Tensor]:
    return [*head.norm.parameters(), *head.linear.parameters()]


def gradients(loss: Tensor, leaves: list[Tensor], upstream: float = 1.0) -> list[Tensor]:
    found = torch.autograd.grad(loss * upstream, leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves, found, strict=True)
    ]


def gradients_equal(mine: Tensor, truth: Tensor, leaves: list[Tensor]) -> None:
    ours, theirs = gradients(mine, leaves, -2.5), gradients(truth, leaves, -2.5)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def all_finite(loss: Tensor, leaves: list[Tensor]) -> bool:
    found = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
    grads = [grad for grad in found if grad is not None]
    return all(bool(value.isfinite().all()) for value in [loss, *grads])


def some_mask(rows: int, tokens: int, seed: int) -> Tensor:
    mask = torch.rand(rows, tokens, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[0, 0] = True
    return mask


# --- cosine -------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["linear", "uniform", [0.0, 1.0, 0.5, 2.0]])
def test_cosine_equals_the_reference(weights: str | list[float]) -> None:
    hidden, _ = problem()
    mine = cosine_alignment(hidden, weights=weights)
    truth = reference.cosine_alignment(hidden, layer_weights(range(1, 5), weights))
    torch.testing.assert_close(mine, truth, **CLOSE)
    gradients_equal(mine, truth, hidden)


def test_cosine_by_hand() -> None:
    """L = 2: lambda_1 = 1/3 times 1 - cos 60 degrees; the last layer's own term is 0."""
    first = torch.tensor([[[1.0, math.sqrt(3.0)]]])
    last = torch.tensor([[[5.0, 0.0]]])
    assert cosine_alignment([first, last]).item() == pytest.approx(1 / 6, rel=1e-6)
    assert cosine_alignment([last, 0.1 * last]).item() == pytest.approx(0.0, abs=1e-7)
    assert cosine_alignment([-last, last]).item() == pytest.approx(2 / 3, rel=1e-6)


def test_cosine_last_layer_learns_unless_detached() -> None:
    hidden, _ = problem()
    both = gradients(cosine_alignment(hidden), hidden)
    fixed = gradients(cosine_alignment(hidden, detach_last=True), hidden)
    for free, held in zip(both[:-1], fixed[:-1], strict=True):
        torch.testing.assert_close(free, held, **CLOSE)
    assert bool((both[-1] != 0.0).any())
    assert bool((fixed[-1] == 0.0).all())


@settings(deadline=None, max_examples=25)
@given(
    layers=st.integers(1, 4),
    scales=st.lists(st.floats(1e-12, 1e12), min_size=4, max_size=4),
    seed=st.integers(0, 50),
)
def test_cosine_does_not_see_lengths_nor_a_rotation(
    layers: int, scales: list[float], seed: int
) -> None:
    hidden, _ = problem(layers, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(6, 6, generator=generator)).Q
    moved = [scale * states @ rotation for scale, states in zip(scales, hidden, strict=False)]
    once, again = cosine_alignment(hidden), cosine_alignment(moved)
    torch.testing.assert_close(again, once, **CLOSE)
    assert -1e-6 < once.item() <= 2.0


@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 3), tokens=st.integers(1, 6), seed=st.integers(0, 50))
def test_cosine_mask_drops_tokens_and_order_does_not_count(
    rows: int, tokens: int, seed: int
) -> None:
    hidden, _ = problem(3, rows, tokens, seed=seed)
    mask = some_mask(rows, tokens, seed)
    dropped = cosine_alignment([states[mask][None] for states in hidden])
    masked = cosine_alignment(hidden, mask=mask)
    torch.testing.assert_close(masked, dropped, **CLOSE)
    gradients_equal(masked, dropped, hidden)
    each = cosine_alignment(hidden, mask=mask, reduction="none")
    assert each.shape == (rows, tokens)
    assert bool((each[~mask] == 0.0).all())
    torch.testing.assert_close(each[mask].mean(), masked, **CLOSE)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    moved = cosine_alignment([states[:, order] for states in hidden], reduction="none")
    torch.testing.assert_close(moved, cosine_alignment(hidden, reduction="none")[:, order], **CLOSE)


def test_cosine_gradients_numerically() -> None:
    hidden, _ = problem(3, 1, 3, 4)
    leaves = [states.detach().double().requires_grad_() for states in hidden]
    mask = torch.tensor([[True, False, True]])
    assert cosine_alignment(leaves).dtype == torch.float64
    assert torch.autograd.gradcheck(lambda *x: cosine_alignment(x, mask=mask), leaves)


def test_cosine_keeps_the_states_and_no_copies_of_them() -> None:
    """The memory claim: between forward and backward only what was given is held."""
    hidden, _ = problem(layers=4)
    half = [states.detach().bfloat16().requires_grad_() for states in hidden]
    held = {states.data_ptr() for states in half}
    copies: list[Tensor] = []

    def seen(tensor: Tensor) -> Tensor:
        if tensor.numel() >= half[0].numel() and tensor.data_ptr() not in held:
            copies.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        cosine_alignment(half)
    assert not copies


# The gradient of a direction is 1 / length: the smallest normal number is the worst case.
LENGTHS = {
    torch.float32: [0.0, 1e-45, 1e-39, 1.2e-38, 1e-20, 3e38],
    torch.bfloat16: [0.0, 1e-39, 1.2e-38, 1e-20, 3e38],
    torch.float16: [0.0, 6e-8, 6.2e-5, 6e4],
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    ("dtype", "length"), [(dtype, length) for dtype, all_ in LENGTHS.items() for length in all_]
)
@pytest.mark.parametrize("tokens", [1, 3])
def test_cosine_is_finite(tokens: int, dtype: torch.dtype, length: float, reduction: str) -> None:
    hidden, _ = problem(3, 1, tokens)
    unit = [states.detach().sign() for states in hidden]
    ordinary = torch.ones_like(unit[0])
    for states in (
        [length * unit[0], length * unit[1], length * unit[2]],
        [length * unit[0], ordinary, ordinary],
        [ordinary, ordinary, length * unit[2]],
    ):
        leaves = [layer.to(dtype).requires_grad_() for layer in states]
        loss = cosine_alignment(leaves, reduction=reduction)  # type: ignore[arg-type]
        assert loss.dtype == torch.float32
        assert all_finite(loss, leaves)


def test_cosine_of_a_zero_vector_is_0_without_gradient() -> None:
    zero = torch.zeros(1, 1, 3, requires_grad=True)
    last = torch.ones(1, 1, 3, requires_grad=True)
    loss = cosine_alignment([zero, last])
    assert loss.item() == pytest.approx(1 / 3)
    assert all(bool((grad == 0.0).all()) for grad in gradients(loss, [zero, last]))


def test_cosine_hides_no_nan_that_counts() -> None:
    bad = torch.tensor([[[torch.nan, 1.0], [1.0, 1.0]]], requires_grad=True)
    last = torch.ones(1, 2, 2, requires_grad=True)
    assert cosine_alignment([bad, last]).isnan()
    without = cosine_alignment([bad, last], mask=torch.tensor([[False, True]]))
    assert without.item() == pytest.approx(0.0, abs=1e-6)
    assert all_finite(without, [bad, last])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
def test_nothing_to_compare_is_zero_with_zero_gradients(value: float) -> None:
    hidden = [torch.full((1, 2, 3), value, requires_grad=True) for _ in range(2)]
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    classifier = OutputHead(nn.Identity(), nn.Linear(3, 5))
    for loss in (
        cosine_alignment(hidden, mask=nothing),
        cosine_alignment(hidden, exit_layers=[]),
        cosine_alignment(hidden[-1:], reduction="none").sum(),
        kl_to_last(hidden, classifier, mask=nothing),
        kl_to_last(hidden, classifier, exit_layers=[]),
        kl_to_last(hidden[-1:], classifier),
    ):
        assert loss.item() == 0.0
        assert all(bool((grad == 0.0).all()) for grad in gradients(loss, hidden))


# --- KL -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("weights", ["linear", "uniform", [0.0, 1.0, 0.5, 2.0]])
def test_kl_equals_the_reference(weights: str | list[float], temperature: float) -> None:
    hidden, classifier = problem()
    mine = kl_to_last(hidden, classifier, weights=weights, temperature=temperature)
    scale = layer_weights(range(1, 5), weights)
    truth = reference.kl_to_last(hidden, classifier, scale, temperature)
    torch.testing.assert_close(mine, truth, **CLOSE)
    gradients_equal(mine, truth, [*hidden, *parameters(classifier)])


def test_kl_by_hand() -> None:
    """p^L = (3/4, 1/4), p^1 = (1/2, 1/2), lambda_1 = 1/3; the other direction gives 0.1438."""
    first = torch.zeros(1, 1, 2)
    last = torch.tensor([[[math.log(3.0), 0.0]]])
    divergence = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    loss = kl_to_last([first, last], reading_as_it_is(2))
    assert loss.item() == pytest.approx(divergence / 3, rel=1e-5)
    assert kl_to_last([last, last], reading_as_it_is(2)).item() == pytest.approx(0.0, abs=1e-7)


def test_kl_at_high_temperature_is_half_the_variance_of_the_logits_difference() -> None:
    """Why the factor is T^2: with it the loss has a limit, sum of (dz - mean dz)^2 / 2V."""
    hidden = [states.detach().double() for states in problem(2)[0]]
    difference = hidden[0] - hidden[1]
    limit = difference.var(-1, correction=0).mean() / 2 / 3
    head = reading_as_it_is(6)
    head.linear.double()
    loss = kl_to_last(hidden, head, temperature=1e4)
    # The next term of the expansion is smaller by 1/T.
    assert loss.item() == pytest.approx(limit.item(), rel=1e-3)


def test_kl_teaches_the_shallow_layers_only() -> None:
    hidden, classifier = problem()
    loss = kl_to_last(hidden, classifier, exit_layers=[2])
    grads = gradients(loss, hidden)
    learns = [bool((grad != 0.0).any()) for grad in grads]
    assert learns == [False, True, False, False]


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 3),
    tokens=st.integers(1, 6),
    seed=st.integers(0, 50),
)
def test_kl_masks_and_order(rows: int, tokens: int, seed: int) -> None:
    hidden, classifier = problem(3, rows, tokens, seed=seed)
    mask = some_mask(rows, tokens, seed)
    kept = [states[mask][None] for states in hidden]
    dropped = kl_to_last(kept, classifier)
    order = torch.randperm(kept[0].shape[1], generator=torch.Generator().manual_seed(seed))
    moved = kl_to_last([states[:, order] for states in kept], classifier)
    torch.testing.assert_close(moved, dropped, **CLOSE)
    masked = kl_to_last(hidden, classifier, mask=mask)
    torch.testing.assert_close(masked, dropped, **CLOSE)
    gradients_equal(masked, dropped, [*hidden, *parameters(classifier)])
    assert dropped.item() > -1e-6


def test_kl_gradients_numerically() -> None:
    hidden, classifier = problem(3, 1, 2, 3, 4)
    leaves = [states.detach().double().requires_grad_() for states in hidden[:-1]]
    last = hidden[-1].detach().double()
    classifier.norm.double()
    classifier.linear.double()

    def loss(*inner: Tensor) -> Tensor:
        return kl_to_last([*inner, last], classifier, temperature=2.0)

    assert loss(*leaves).dtype == torch.float64
    assert torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0.0, 1e-30, 6e4])
@pytest.mark.parametrize("tokens", [1, 3])
def test_kl_is_finite(tokens: int, size: float, dtype: torch.dtype) -> None:
    hidden, _ = problem(3, 1, tokens)
    leaves = [(size * states.detach().sign()).to(dtype).requires_grad_() for states in hidden]
    head = reading_as_it_is(6)
    head.linear.to(dtype)
    loss = kl_to_last(leaves, head)
    assert loss.dtype == torch.float32
    assert all_finite(loss, leaves)


def test_kl_in_float32_whatever_the_classifier() -> None:
    hidden, classifier = problem(tokens=50)
    half = [states.detach().bfloat16() for states in hidden]
    classifier.norm.bfloat16()
    classifier.linear.bfloat16()
    loss = kl_to_last(half, classifier)
    classifier.norm.float()
    classifier.linear.float()
    expected = kl_to_last([states.float() for states in half], classifier)
    assert loss.dtype == torch.float32
    # bf16 keeps 8 bits: logits of size ~1 are off by up to 2^-8 each; their mean by far less.
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0.0)


# --- both ---------------------------------------------------------------------------------


def test_layers_that_do_not_count_need_not_be_given() -> None:
    hidden, classifier = problem(layers=4)
    sparse = [None, hidden[1], None, hidden[3]]
    chosen = [hidden[1], hidden[3]]
    scale = [2 / 6, 4 / 6]
    expected = reference.cosine_alignment(chosen, scale)
    torch.testing.assert_close(cosine_alignment(sparse, exit_layers=[2]), expected, **CLOSE)
    expected = reference.kl_to_last(chosen, classifier, scale)
    torch.testing.assert_close(kl_to_last(sparse, classifier, exit_layers=[2]), expected, **CLOSE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_states": []}, "hidden_states is empty"),
        ({"hidden_states": [torch.zeros(1, 2, 3), None]}, "None as its last entry"),
        ({"hidden_states": [None, torch.zeros(1, 2, 3)]}, "no tensor for layer 1"),
        ({"hidden_states": [torch.zeros(2, 3)]}, r"\(2, 3\) as its last entry"),
        ({"hidden_states": [torch.zeros(1, 2, 4), torch.zeros(1, 2, 3)]}, "expected the same"),
        ({"exit_layers": [3]}, "exit layer 3 is out of range"),
        ({"weights": "linaer"}, "Did you mean 'linear'"),
        ({"weights": [1.0]}, "1 numbers, but 2 layers count"),
        ({"mask": torch.ones(2, 2, dtype=torch.bool)}, "mask has shape"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], message: str) -> None:
    arguments = {"hidden_states": [torch.zeros(1, 2, 3), torch.zeros(1, 2, 3)], **change}
    with pytest.raises(ExitServeError, match=message):
        cosine_alignment(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ExitServeError, match=message):
        kl_to_last(**arguments, head=reading_as_it_is(3))  # type: ignore[arg-type]


def test_bad_reduction_and_temperature_are_named() -> None:
    hidden, classifier = problem()
    with pytest.raises(ExitServeError, match="Did you mean 'none'"):
        cosine_alignment(hidden, reduction="non")  # type: ignore[arg-type]
    for temperature in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ExitServeError, match="must be a positive number"):
            kl_to_last(hidden, classifier, temperature=temperature)
