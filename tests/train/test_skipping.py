"""Frozen positions, once drawn: token-by-token decoding, finite differences.

Shapes: B rows, T tokens, L layers, D hidden.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from exitserve.checkpoint.decoder import decoder_parts
from exitserve.reference import cached

from .passes import EXITS, NUM_LAYERS, at_depths, random_ids, skipped_pass
from .test_freezing import CLOSE, FAMILIES, Load

# --- frozen at random: token-by-token decoding ---------------------------------------------------


@torch.no_grad()
def decoded(model: Any, ids: Tensor, depths: Tensor) -> Tensor:
    """Last states [T, D], one token at a time with a key-value cache, as serving defines it."""
    cache, states = DynamicCache(), list[Tensor]()
    for token, depth in zip(ids.tolist(), depths.tolist(), strict=True):
        state: dict[str, Tensor] = {}

        def after(
            layer: int, output: Any, depth: int = depth, state: dict[str, Tensor] = state
        ) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            if layer <= depth:
                state["last"] = hidden
            hidden = state["last"]
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        handles = [
            layer.register_forward_hook(lambda _m, _a, output, n=n: after(n, output))
            for n, layer in enumerate(decoder_parts(model).layers, start=1)
        ]
        past = cached(model.base_model, cache)
        model.base_model(input_ids=torch.tensor([[token]]), use_cache=True, **past)
        for handle in handles:
            handle.remove()
        states.append(state["last"][0, 0])
    return torch.stack(states)


def random_depths(rows: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    choices = torch.tensor([*EXITS, NUM_LAYERS])
    depth = choices[torch.randint(3, (rows, length), generator=generator)]
    depth[:, :2] = NUM_LAYERS
    return depth


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_at_given_depths_is_decoding_token_by_token(load: Load, family: str) -> None:
    model = load(family)
    ids, depth = random_ids(3, 16), random_depths(3, 16)
    _, batch = skipped_pass(model, at_depths(depth), ids)
    for row in range(3):
        expected = decoded(model, ids[row], depth[row])
        last = batch.hidden[NUM_LAYERS][row].detach()
        torch.testing.assert_close(last, expected, **CLOSE)


# --- gradients -----------------------------------------------------------------------------------


def test_gradients_are_those_of_finite_differences(load: Load) -> None:
    # GPT-2, because the norms of the others compute in float32 whatever the model's dtype.
    model = load("gpt2").double()
    ids = random_ids(2, 10)
    skipping = at_depths(random_depths(2, 10))
    parameters = list(model.transformer.parameters())
    generator = torch.Generator().manual_seed(1)
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
    loss, _ = skipped_pass(model, skipping, ids)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    # The final norm is no part of the states.
    unused = [p for p, g in zip(parameters, gradients, strict=True) if g is None]
    assert len(unused) == 2
    slope = sum((g * d).sum() for g, d in zip(gradients, direction, strict=True) if g is not None)

    @torch.no_grad()
    def moved(step: float) -> Tensor:
        for parameter, way in zip(parameters, direction, strict=True):
            parameter.add_(way, alpha=step)
        value, _ = skipped_pass(model, skipping, ids)
        for parameter, way in zip(parameters, direction, strict=True):
            parameter.sub_(way, alpha=step)
        return value

    measured = (moved(1e-6) - moved(-1e-6)) / 2e-6
    # Central differences in float64: roundings of 1e-16 * |loss| / 1e-6, and the third
    # derivative times 1e-12.
    torch.testing.assert_close(slope, measured, rtol=1e-5, atol=1e-6)
