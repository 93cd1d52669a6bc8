"""Positions that freeze by confidence in a training pass: the oracle freezes the same ones.

Shapes: B rows, T tokens, L layers, D hidden, E exits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exitserve.checkpoint.decoder import capture_hidden, decoder_parts
from exitserve.policy import ExitPolicy
from exitserve.reference import OracleTrace, Reference
from exitserve_kernels.exit_check import check_logits
from exitserve_training.objectives.objective import LossInputs
from exitserve_training.skipping import SkippedPositions

from .passes import EXITS, NUM_LAYERS, FixedSkips, random_ids, skipped_pass

Load = Callable[[str], Any]

FAMILIES = ("llama", "qwen3", "gpt2")
# The same float32 sums over 128 to 256 numbers, in another order because matrices of a batch are
# multiplied otherwise than those of one row or one token: about 10 roundings of 6e-8 in each of 6
# layers, relative to states and logits of up to 30.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def by_confidence(prompts: Sequence[int], thresholds: Sequence[float]) -> FixedSkips:
    """Each row with a prompt and a threshold of its own."""

    def make(mask: Tensor) -> SkippedPositions:
        said = torch.arange(mask.shape[1]) >= torch.tensor(prompts)[:, None]
        return SkippedPositions(EXITS, NUM_LAYERS, mask, mask & said, torch.tensor(thresholds))

    return FixedSkips(make)


def confidence_of(logits: Tensor) -> Tensor:
    """[N] of logits [N, V]."""
    return check_logits(logits, torch.zeros(len(logits))).confidence


@torch.no_grad()
def confidences(model: Any, input_ids: Tensor) -> Tensor:
    """Of every check of a pass at full depth: [E, B, T]."""
    parts = decoder_parts(model)
    with capture_hidden(parts.layers, EXITS) as hidden:
        model.base_model(input_ids=input_ids, use_cache=False)
    found = [confidence_of(parts.classify(hidden[layer]).flatten(0, 1)) for layer in EXITS]
    return torch.stack(found).unflatten(1, input_ids.shape)


class Watched(Reference):
    """The oracle, with the states that reach each depth."""

    def __init__(self, model: Any) -> None:
        training = model.training
        super().__init__(model, EXITS)
        model.train(training)
        self.hidden: dict[int, Tensor] = {}

    def _run_layers(self, input_ids: Tensor, cache: Any) -> Tensor:
        # The input of layer l + 1 is what the oracle's own hook on layer l made of its output.
        handles = [
            layer.register_forward_pre_hook(self._keeper(depth), with_kwargs=True)
            for depth, layer in enumerate(self.parts.layers)
        ]
        last = super()._run_layers(input_ids, cache)
        for handle in handles:
            handle.remove()
        self.hidden[NUM_LAYERS] = last
        return last

    def _keeper(self, depth: int) -> Callable[..., None]:
        def keep(_module: Any, args: Any, kwargs: Any) -> None:
            self.hidden[depth] = (args[0] if args else kwargs["hidden_states"])[0]

        return keep


def assert_row_is_the_oracles(
    model: Any, batch: LossInputs, row: int, ids: Tensor, prompt: int, threshold: float
) -> OracleTrace:
    oracle = Watched(model)
    trace = oracle.trace(ids.tolist(), prompt, ExitPolicy.confidence(threshold))
    length = len(ids)
    assert batch.depth is not None
    assert batch.depth[row, :length].tolist() == trace.depth.tolist()
    for layer in range(1, NUM_LAYERS + 1):
        own = batch.hidden[layer][row, :length].detach()
        torch.testing.assert_close(own, oracle.hidden[layer], **CLOSE)
    with torch.no_grad():
        logits = batch.classifier(batch.hidden[NUM_LAYERS][row, :length])
    torch.testing.assert_close(logits, trace.logits, **CLOSE)
    return trace


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_pass_is_the_oracles(load: Load, family: str) -> None:
    model = load(family)
    ids = random_ids(5, 24)
    prompts = [1, 4, 9, 3, 2]
    quantiles = confidences(model, ids).quantile(torch.tensor([0.3, 0.6, 0.85])).tolist()
    # Besides: a row where every check passes, and one where none does.
    thresholds = [*quantiles, 0.0, 1.0]
    _, batch = skipped_pass(model, by_confidence(prompts, thresholds), ids)
    assert batch.depth is not None
    for row, (prompt, threshold) in enumerate(zip(prompts, thresholds, strict=True)):
        assert_row_is_the_oracles(model, batch, row, ids[row], prompt, threshold)
    # The test means nothing unless rows stop at every depth, and at several within a row.
    found = [set(batch.depth[row, prompts[row] :].tolist()) for row in range(3)]
    assert set.union(*found) == {*EXITS, NUM_LAYERS}
    assert all(len(depths) > 1 for depths in found)
    assert batch.depth[3].tolist() == [NUM_LAYERS] * 3 + [EXITS[0]] * 21
    assert batch.depth[4].eq(NUM_LAYERS).all()


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**16),
    rows=st.lists(
        st.tuples(st.integers(1, 12), st.integers(3, 12), st.floats(0.02, 0.6)),
        min_size=1,
        max_size=4,
    ),
)
def test_padded_rows_are_the_oracles(
    load: Load, seed: int, rows: list[tuple[int, int, float]]
) -> None:
    model = load("llama")
    longest = max(length for _, length, _ in rows)
    ids = random_ids(len(rows), longest, seed)
    mask = torch.arange(longest) < torch.tensor([length for _, length, _ in rows])[:, None]
    skipping = by_confidence([prompt for prompt, _, _ in rows], [last for _, _, last in rows])
    _, batch = skipped_pass(model, skipping, ids, attention_mask=mask.long())
    assert batch.depth is not None
    for row, (prompt, length, threshold) in enumerate(rows):
        # The oracle's thresholds are float32 too, so no confidence lies between the two.
        assert_row_is_the_oracles(model, batch, row, ids[row, :length], prompt, threshold)
        assert batch.depth[row, length:].eq(NUM_LAYERS).all()
