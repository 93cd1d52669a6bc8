"""The training forward: what it leaves alone, what it evaluates, and the loss it returns.

Shapes: B rows, T tokens, L layers, D hidden, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from exitserve_training.forward import ExitPass, Quality
from exitserve_training.layer_weights import layer_weights
from exitserve_training.losses.tokens import IGNORED
from exitserve_training.parts import model_parts
from exitserve_training.tasks import shifted_labels

from .passes import EXITS, NUM_LAYERS, all_skipping, at_depths, random_ids, wrap

Load = Callable[[str], Any]

DEPTHS = (*EXITS, NUM_LAYERS)
# Means of cross-entropies of 2 to 20 nats, of the same float32 logits up to the order of sums:
# 10 roundings of 6e-8 in each of 6 layers, relative.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def train_pass(model: Any, input_ids: Tensor, **inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    found: tuple[Tensor, dict[str, Tensor]]
    found = model(input_ids=input_ids, **inputs, exit_pass=ExitPass(step=0))
    return found


@torch.no_grad()
def evaluate(model: Any, input_ids: Tensor, **inputs: Tensor) -> Quality:
    quality: Quality
    quality = model(input_ids=input_ids, **inputs, exit_pass=ExitPass(step=0, job="evaluate"))
    return quality


# --- what it leaves alone ------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_without_an_exit_pass_the_model_is_as_before(load: Load, family: str) -> None:
    model, ids = load(family), random_ids(2, 12)
    before = model(input_ids=ids, output_hidden_states=True)
    wrapped = wrap(model, skipping=all_skipping())

    def assert_same() -> None:
        # The same sums in the same order: bit by bit.
        now = model(input_ids=ids, output_hidden_states=True)
        assert torch.equal(now.logits, before.logits)
        pairs = zip(now.hidden_states, before.hidden_states, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)

    assert_same()
    # What was drawn for a training pass must not act on another batch, of whatever shape.
    _, metrics = train_pass(model, ids)
    assert metrics["frozen_share"] > 0
    assert_same()
    train_pass(model, ids[:1, :5])
    assert_same()
    generated = model.generate(ids[:, :4], max_new_tokens=4, do_sample=False)
    evaluate(model, ids)
    assert_same()
    wrapped.remove()
    assert_same()
    assert (
        generated.tolist() == model.generate(ids[:, :4], max_new_tokens=4, do_sample=False).tolist()
    )


# --- evaluation ----------------------------------------------------------------------------------


def plain_losses(model: Any, ids: Tensor, labels: Tensor) -> dict[int, Tensor]:
    """Each depth's cross-entropy from the hidden states that transformers gives out."""
    with torch.no_grad():
        # Its last state is behind the norm already, the others are not.
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
        parts = model_parts(model)
        normed = {layer: parts.norm(states[layer]) for layer in EXITS}
        normed[NUM_LAYERS] = states[NUM_LAYERS]
        logits = {layer: model.get_output_embeddings()(normed[layer]) for layer in DEPTHS}
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap is not None:
        logits = {layer: cap * torch.tanh(found / cap) for layer, found in logits.items()}
    return {
        layer: functional.cross_entropy(found[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        for layer, found in logits.items()
    }


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2"])
def test_evaluation_is_the_plain_cross_entropy_of_each_depth(load: Load, family: str) -> None:
    model, ids = load(family).eval(), random_ids(3, 12)
    wrap(model, skipping=all_skipping())
    expected = plain_losses(model, ids, ids)
    quality = evaluate(model, ids)
    assert quality.tokens.item() == 3 * 11
    assert len(quality.of_layers) == 2 * len(DEPTHS)
    for layer in DEPTHS:
        torch.testing.assert_close(
            quality.of_layers[f"loss_layer_{layer}"], expected[layer], **CLOSE
        )
    own = model(input_ids=ids, labels=ids).loss.detach()
    torch.testing.assert_close(quality.of_layers[f"loss_layer_{NUM_LAYERS}"], own, **CLOSE)


# --- labels and padding --------------------------------------------------------------------------


def test_each_position_is_to_say_the_next_token() -> None:
    ids = torch.tensor([[5, 6, 7], [8, 9, 10], [1, 11, 12]])
    mask = torch.tensor([[True, True, True], [True, True, False], [False, True, True]])
    # The last has no next; before padding there is none either, and padding says nothing.
    shifted = [[6, 7, IGNORED], [9, IGNORED, IGNORED], [IGNORED, 12, IGNORED]]
    assert shifted_labels(ids, mask).tolist() == shifted


@pytest.mark.parametrize("given", ["labels", "no labels"])
@pytest.mark.parametrize("skips", [False, True])
def test_padding_changes_no_loss(load: Load, given: str, skips: bool) -> None:
    model = load("llama")
    lengths = (12, 7, 9)
    ids = random_ids(3, 12)
    mask = torch.arange(12) < torch.tensor(lengths)[:, None]
    ids = torch.where(mask, ids, 1)
    inputs = {"labels": torch.where(mask, ids, IGNORED)} if given == "labels" else {}
    wrap(model, skipping=all_skipping() if skips else None)
    loss, found = train_pass(model, ids, attention_mask=mask.long(), **inputs)
    quality = evaluate(model, ids, attention_mask=mask.long(), **inputs)
    alone = [ids[row : row + 1, :length] for row, length in enumerate(lengths)]
    # Means over tokens: a row counts by its tokens.
    counts = torch.tensor([length - 1.0 for length in lengths])
    each = [evaluate(model, row).of_layers for row in alone]
    assert quality.tokens.item() == counts.sum().item()
    for layer in DEPTHS:
        expected = torch.stack([one[f"loss_layer_{layer}"] for one in each]) @ counts / counts.sum()
        torch.testing.assert_close(quality.of_layers[f"loss_layer_{layer}"], expected, **CLOSE)
    if not skips:
        rows = torch.stack([train_pass(model, row)[0] for row in alone])
        torch.testing.assert_close(loss, rows @ counts / counts.sum(), **CLOSE)
        return
    # How many tokens reach a layer differs from row to row, and so each layer's weights; but
    # what is frozen is the same.
    metrics = [train_pass(model, row)[1] for row in alone]
    for name in ("frozen_share", "mean_depth"):
        own = torch.stack([values[name] for values in metrics])
        shares = torch.tensor(lengths) / sum(lengths)
        torch.testing.assert_close(found[name], own @ shares, **CLOSE)


# --- the loss ------------------------------------------------------------------------------------


def by_hand(model: Any, ids: Tensor, depth: Tensor) -> dict[int, Tensor]:
    """Each depth's cross-entropy over the positions that reach it, layer by layer."""
    states: list[Tensor] = []
    parts = model_parts(model)

    def freeze(layer: int, args: Any, kwargs: Any, output: Any) -> Any:
        before = args[0] if args else kwargs["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        hidden = torch.stack(
            [
                torch.stack([b if d < layer else a for b, a, d in zip(*row, strict=True)])
                for row in zip(before, after, depth, strict=True)
            ]
        )
        states.append(hidden)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    handles = [
        layer.register_forward_hook(
            lambda _m, args, kwargs, output, n=n: freeze(n, args, kwargs, output), with_kwargs=True
        )
        for n, layer in enumerate(parts.layers, start=1)
    ]
    parts.body(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    losses = {}
    for layer in DEPTHS:
        own = []
        for row in range(len(ids)):
            for place in range(ids.shape[1] - 1):
                if depth[row, place] >= layer:
                    logits = parts.head(states[layer - 1][row, place])
                    own.append(functional.cross_entropy(logits, ids[row, place + 1]))
        losses[layer] = torch.stack(own).mean() if own else torch.zeros(())
    return losses


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_frozen_positions_count_in_no_deeper_loss(load: Load, family: str) -> None:
    model, ids = load(family), random_ids(2, 8)
    depth = torch.tensor([[6, 2, 4, 6, 2, 2, 4, 6], [6, 4, 4, 4, 2, 6, 2, 6]])
    expected = by_hand(model, ids, depth)
    scale = dict(zip(DEPTHS, layer_weights(DEPTHS, "linear"), strict=True))
    # The last position of a row says nothing; every other weighs the same at all its layers.
    reached = {layer: (depth[:, :-1] >= layer).float().mean() for layer in DEPTHS}
    parts = [scale[layer] * reached[layer] * expected[layer] for layer in DEPTHS]
    total = torch.stack(parts).sum()
    parameters = list(model.parameters())
    slopes = torch.autograd.grad(total, parameters)
    wrap(model, skipping=at_depths(depth))
    loss, metrics = train_pass(model, ids)
    for layer in DEPTHS:
        torch.testing.assert_close(
            metrics[f"loss_layer_{layer}"], expected[layer].detach(), **CLOSE
        )
    torch.testing.assert_close(loss, total, **CLOSE)
    found = torch.autograd.grad(loss, parameters)
    # Sums over 14 tokens and 3 layers more, of summands that cancel: relative to the largest.
    for own, slope in zip(found, slopes, strict=True):
        bound = 1e-5 * slope.abs().max().item()
        torch.testing.assert_close(own, slope, rtol=1e-4, atol=max(bound, 1e-7))
