"""The aligned loss against the plain computation that it must equal."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from exitserve_training.losses import OutputHead, aligned_cross_entropy, layer_weights, predictions

# Both sides are float32 and differ in summation order only (chunks of tokens, then layers): a
# few rounding errors of 1.2e-7 relative over sums of at most a few hundred terms.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def problem(
    layers: int = 4, rows: int = 2, tokens: int = 7, width: int = 8, vocab: int = 19
) -> tuple[list[Tensor], OutputHead, Tensor]:
    generator = torch.Generator().manual_seed(layers * 1000 + tokens)
    hidden = [
        torch.randn(rows, tokens, width, generator=generator).requires_grad_()
        for _ in range(layers)
    ]
    torch.manual_seed(1)
    classifier = OutputHead(nn.RMSNorm(width), nn.Linear(width, vocab, bias=False))
    labels = torch.randint(vocab, (rows, tokens), generator=generator)
    return hidden, classifier, labels


def gradients(
    loss: Tensor, hidden: list[Tensor], head: OutputHead, upstream: float = 1.0
) -> list[Tensor]:
    leaves = [*hidden, *head.norm.parameters(), *head.linear.parameters()]
    found = torch.autograd.grad(loss * upstream, leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves, found, strict=True)
    ]


@given(st.sets(st.integers(1, 40), min_size=1), st.sampled_from(["linear", "uniform"]))
def test_named_weights_sum_to_one_and_keep_their_ratios(layers: set[int], scheme: str) -> None:
    """Of all layers that is equation 3."""
    ordered = sorted(layers)
    weights = layer_weights(ordered, scheme)
    assert sum(weights) == pytest.approx(1.0)
    for layer, weight in zip(ordered, weights, strict=True):
        share = layer / ordered[0] if scheme == "linear" else 1.0
        assert weight / weights[0] == pytest.approx(share)


def test_a_token_left_out_at_a_layer_changes_no_other_tokens_weight() -> None:
    """Each layer's mean is over its own tokens; the sum divides by those that count at all."""
    hidden, classifier, labels = problem()
    labels[0, 3] = -100
    mask = torch.ones_like(labels, dtype=torch.bool)
    mask[0, 0] = False
    generator = torch.Generator().manual_seed(3)
    masks = {layer: torch.rand(labels.shape, generator=generator) < 0.5 for layer in (1, 2, 3)}
    masks[4] = torch.zeros_like(mask)
    scale = {1: 0.5, 2: 0.0, 3: 2.0, 4: 1.0}
    states = dict(enumerate(hidden, start=1))
    loss, means = aligned_cross_entropy(
        states, classifier, labels.masked_fill(~mask, -100), scale, masks=masks
    )
    expected = torch.zeros(())
    for layer in (1, 2, 3):
        counted = (labels != -100) & mask & masks[layer]
        mean = functional.cross_entropy(classifier(states[layer][counted]), labels[counted])
        torch.testing.assert_close(means[layer], mean.detach(), **CLOSE)
        share = counted.sum() / ((labels != -100) & mask).sum()
        expected = expected + scale[layer] * share * mean
    assert means[4].item() == 0.0, "no token of layer 4 counts"
    assert not any(mean.requires_grad for mean in means.values())
    torch.testing.assert_close(loss, expected, **CLOSE)
    ours = gradients(loss, hidden, classifier)
    for mine, truth in zip(ours, gradients(expected, hidden, classifier), strict=True):
        torch.testing.assert_close(mine, truth, **CLOSE)


def test_what_a_layer_says_of_each_token() -> None:
    # More tokens than are classified at once, some of which do not count.
    hidden, classifier, labels = problem(layers=1, tokens=1100)
    labels[:, ::7] = -100
    said = predictions(hidden[0], classifier, labels)
    counted = labels != -100
    logits, own = classifier(hidden[0].detach())[counted], labels[counted]
    nats = functional.cross_entropy(logits, own, reduction="none")
    torch.testing.assert_close(said.nats, nats, **CLOSE)
    assert torch.equal(said.right, logits.argmax(-1) == own)
    most, second = logits.topk(2).values.T
    margin = logits.gather(-1, own[:, None])[:, 0] - torch.where(said.right, second, most)
    torch.testing.assert_close(said.margin, margin, **CLOSE)
    nothing = predictions(hidden[0], classifier, torch.full_like(labels, -100))
    assert {len(one) for one in nothing} == {0}
