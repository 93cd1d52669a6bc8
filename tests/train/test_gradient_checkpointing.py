"""The training forward checkpointed or under autocast: what is skipped stays the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from exitserve_training.forward import ExitPass
from exitserve_training.objectives.dispersion.options import DispersionOptions
from exitserve_training.objectives.objective import LossInputs

from .passes import EXITS, NUM_LAYERS, all_skipping, random_ids, wrap

Load = Callable[[str], Any]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_checkpointing_changes_nothing(load: Load, family: str) -> None:
    ids = random_ids(4, 16)
    results = []
    for checkpointed in (False, True):
        model = load(family)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        wrapped = wrap(model, skipping=all_skipping())
        runs: list[int] = []
        for depth, layer in enumerate(wrapped.parts.layers, start=1):
            layer.mlp.register_forward_pre_hook(lambda *_, n=depth, runs=runs: runs.append(n))
        loss, metrics = model(input_ids=ids, exit_pass=ExitPass(step=0))
        assert 0 < metrics["frozen_share"] < 1
        assert runs == list(range(1, NUM_LAYERS + 1))
        loss.backward()
        # Layers are run again, from the last to the first.
        again = list(range(NUM_LAYERS, 0, -1)) if checkpointed else []
        assert runs[NUM_LAYERS:] == again
        results.append((loss.detach(), metrics, [p.grad for p in model.parameters()]))
    (loss, metrics, gradients), (own_loss, own_metrics, own_gradients) = results
    # The forward pass is the same one. Gradients may be summed in another order.
    assert torch.equal(own_loss, loss)
    assert own_metrics == metrics
    for own, gradient in zip(own_gradients, gradients, strict=True):
        torch.testing.assert_close(own, gradient, rtol=1e-5, atol=1e-7)


def test_frozen_states_are_exact_under_autocast(load: Load) -> None:
    model, ids = load("llama"), random_ids(4, 16)
    wrapped = wrap(model, DispersionOptions(layers="all"), skipping=all_skipping())
    batches: list[LossInputs] = []
    wrapped.objectives.register_forward_pre_hook(lambda _m, args: batches.append(args[0]))
    with torch.autocast("cpu", torch.bfloat16):
        loss, metrics = model(input_ids=ids, exit_pass=ExitPass(step=0))
    loss.backward()
    assert 0 < metrics["frozen_share"] < 1
    (batch,) = batches
    assert batch.depth is not None
    for layer in EXITS:
        frozen = batch.depth == layer
        assert frozen.any()
        assert torch.equal(batch.hidden[NUM_LAYERS][frozen], batch.hidden[layer][frozen])
