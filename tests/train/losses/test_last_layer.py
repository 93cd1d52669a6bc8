"""The cosine and the KL alignment of layers against their definitions."""

import math

import pytest
import torch
from torch import Tensor, nn

from exitserve.errors import ExitServeError
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


def gradients(loss: Tensor, leaves: list[Tensor], upstream: float = 1.0) -> list[Tensor]:
    found = torch.autograd.grad(loss * upstream, leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves, found, strict=True)
    ]


# --- cosine -------------------------------------------------------------------------------


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


# --- KL -----------------------------------------------------------------------------------


def test_kl_by_hand() -> None:
    """p^L = (3/4, 1/4), p^1 = (1/2, 1/2), lambda_1 = 1/3; the other direction gives 0.1438."""
    first = torch.zeros(1, 1, 2)
    last = torch.tensor([[[math.log(3.0), 0.0]]])
    divergence = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    loss = kl_to_last([first, last], reading_as_it_is(2))
    assert loss.item() == pytest.approx(divergence / 3, rel=1e-5)
    assert kl_to_last([last, last], reading_as_it_is(2)).item() == pytest.approx(0.0, abs=1e-7)


def test_kl_teaches_the_shallow_layers_only() -> None:
    hidden, classifier = problem()
    loss = kl_to_last(hidden, classifier, exit_layers=[2])
    grads = gradients(loss, hidden)
    learns = [bool((grad != 0.0).any()) for grad in grads]
    assert learns == [False, True, False, False]


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
