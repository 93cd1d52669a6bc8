"""What a training step skips: who is drawn to freeze, where, and which layers are dropped."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from exitserve_training.losses.tokens import IGNORED
from exitserve_training.recipe import ExitAware, LayerDropout
from exitserve_training.skipping import SkippedPositions, SkipSampler, dropout_rates

Ids = Callable[..., Tensor]

NUM_LAYERS, EXITS = 6, (2, 4)


def drawn(
    skipping: SkipSampler,
    ids: Tensor,
    labels: Tensor | None = None,
    mask: Tensor | None = None,
    step: int = 0,
    total: int = 10,
) -> SkippedPositions:
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    if labels is None:
        labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORED)], dim=1)
    skipped = skipping.draw(step, total, ids, labels, mask)
    assert skipped is not None
    return skipped


# --- layer dropout -------------------------------------------------------------------------------


def test_dropout_rates_are_layerskips() -> None:
    rates = dropout_rates(LayerDropout(rate=0.2), 5, progress=0.0)
    by_hand = [0.2 * (math.exp(layer * math.log(2) / 4) - 1) for layer in range(5)]
    # float32 against float64.
    torch.testing.assert_close(rates, torch.tensor(by_hand), rtol=1e-6, atol=1e-7)
    assert rates[0] == 0.0
    assert rates[-1].item() == pytest.approx(0.2, rel=1e-6)
    assert (rates.diff() > 0).all()


def test_layers_are_dropped_as_often_as_the_rates_say(random_ids: Ids) -> None:
    options = LayerDropout(rate=0.4)
    rows = 4000
    skipped = drawn(SkipSampler(None, options, EXITS, NUM_LAYERS, seed=0), random_ids(rows, 8))
    assert skipped.dropped is not None
    shares = skipped.dropped.float().mean(dim=0)
    rates = dropout_rates(options, NUM_LAYERS, 0.0)
    # Five standard deviations of a share of 4000 draws: a chance of 6e-7 for each layer.
    bound = 5 * (rates * (1 - rates) / rows).sqrt()
    assert ((shares - rates).abs() <= bound).all()
    # Layers are drawn apart from each other: together as often as the product says.
    both = (skipped.dropped[:, 4] & skipped.dropped[:, 5]).float().mean()
    chance = rates[4] * rates[5]
    assert abs(both - chance) <= 5 * (chance * (1 - chance) / rows).sqrt()


# --- draws ---------------------------------------------------------------------------------------


def what(skipped: SkippedPositions, row: int) -> tuple[Any, ...]:
    """All that is drawn for a row."""
    parts = (skipped.depth, skipped.dropped, skipped.may_exit, skipped.thresholds)
    return tuple(None if part is None else part[row].tolist() for part in parts)


def both_kinds() -> list[Any]:
    dropout = LayerDropout(rate=0.5)
    return [
        pytest.param(ExitAware(share=0.5), dropout, id="confidence"),
        pytest.param(ExitAware(share=0.5, select="random"), dropout, id="random"),
    ]


@pytest.mark.parametrize(("aware", "dropout"), both_kinds())
def test_draws_depend_on_seed_step_and_sequence_alone(
    aware: ExitAware, dropout: LayerDropout, random_ids: Ids
) -> None:
    skipping = SkipSampler(aware, dropout, EXITS, NUM_LAYERS, seed=3)
    ids = random_ids(4, 16)
    torch.manual_seed(0)
    whole = drawn(skipping, ids)
    torch.manual_seed(1)
    halves = [drawn(skipping, ids[:2]), drawn(skipping, ids[2:])]
    assert [what(whole, row) for row in range(4)] == [
        what(h, row) for h in halves for row in (0, 1)
    ]
    order = [2, 0, 3, 1]
    mixed = drawn(skipping, ids[order])
    assert [what(mixed, place) for place in range(4)] == [what(whole, row) for row in order]
    assert len({str(what(whole, row)) for row in range(4)}) == 4
    later = drawn(skipping, ids, step=1)
    other = drawn(SkipSampler(aware, dropout, EXITS, NUM_LAYERS, seed=4), ids)
    for skipped in (later, other):
        assert all(what(skipped, row) != what(whole, row) for row in range(4))


@pytest.mark.parametrize(("aware", "dropout"), both_kinds())
def test_draws_do_not_depend_on_padding(
    aware: ExitAware, dropout: LayerDropout, random_ids: Ids
) -> None:
    # A row is padded to the longest of its batch, so padding tells who else is in the batch.
    skipping = SkipSampler(aware, dropout, EXITS, NUM_LAYERS, seed=3)
    ids = random_ids(8, 16)
    mask = torch.arange(16) < torch.arange(9, 17)[:, None]
    labels = torch.where(mask.roll(-1, 1) & mask, ids.roll(-1, 1), IGNORED)
    labels[:, -1] = IGNORED
    padded = drawn(skipping, ids, labels, mask)
    for row in range(8):
        n = 9 + row
        alone = drawn(skipping, ids[row : row + 1, :n], labels[row : row + 1, :n])
        own = padded.depth[row, :n].tolist()
        assert own == alone.depth[0].tolist()
        assert padded.depth[row, n:].eq(NUM_LAYERS).all()
        if alone.may_exit is not None:
            assert padded.may_exit is not None
            assert padded.may_exit[row, :n].tolist() == alone.may_exit[0].tolist()
            assert not padded.may_exit[row, n:].any()
        assert what(padded, row)[1] == what(alone, 0)[1]
        assert what(padded, row)[3] == what(alone, 0)[3]


def test_fraction_of_the_positions_is_frozen_evenly_over_the_exits(random_ids: Ids) -> None:
    ids = random_ids(400, 33)
    count = 400 * 32
    for fraction in (0.25, 1.0):
        aware = ExitAware(share=1.0, select="random", fraction=fraction, longest_prompt=0.0)
        skipped = drawn(SkipSampler(aware, None, EXITS, NUM_LAYERS, seed=0), ids)
        # With no prompt the first position alone is one: something must be read to say the next.
        assert skipped.depth[:, 0].eq(NUM_LAYERS).all()
        decode = skipped.depth[:, 1:]
        for exit_layer in EXITS:
            chance = fraction / len(EXITS)
            found = (decode == exit_layer).float().mean().item()
            # Five standard deviations of 12800 draws.
            assert abs(found - chance) <= 5 * math.sqrt(chance * (1 - chance) / count)
        assert set(decode.unique().tolist()) <= {*EXITS, NUM_LAYERS}
        if fraction == 1.0:
            assert decode.ne(NUM_LAYERS).all()


@pytest.mark.parametrize("select", ["confidence", "random"])
def test_only_tokens_to_be_said_and_no_padding_freeze(select: Any, random_ids: Ids) -> None:
    extra = {"fraction": 1.0} if select == "random" else {}
    aware = ExitAware(share=1.0, select=select, longest_prompt=0.0, **extra)
    skipping = SkipSampler(aware, None, EXITS, NUM_LAYERS, seed=0)
    ids = random_ids(3, 12)
    # By the chat's own tokens: an answer; two answers and a question between; no answer at all.
    said = torch.zeros(3, 12, dtype=torch.bool)
    said[0, 5:9] = said[1, 3:6] = said[1, 9:12] = True
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[0, 9:] = False
    labels = torch.where(said, ids, IGNORED)
    shifted = torch.cat([labels[:, 1:], torch.full((3, 1), IGNORED)], dim=1)
    skipped = drawn(skipping, ids, shifted, mask)
    may_freeze = skipped.depth < NUM_LAYERS if skipped.may_exit is None else skipped.may_exit
    # What serving freezes: tokens that were generated, the last of an answer included.
    assert may_freeze.tolist() == said.tolist()
