"""What a training step skips: who is drawn to freeze."""

from typing import Any

import torch
from torch import Tensor

from exitserve_training.losses.tokens import IGNORED
from exitserve_training.recipe import ExitAware
from exitserve_training.skipping import SkippedPositions, SkipSampler

from .passes import EXITS, NUM_LAYERS, random_ids


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


def what(skipped: SkippedPositions, row: int) -> tuple[Any, ...]:
    """All that is drawn for a row."""
    return skipped.may_exit[row].tolist(), skipped.thresholds[row].item()


def test_draws_depend_on_seed_step_and_sequence_alone() -> None:
    aware = ExitAware(share=0.5)
    skipping = SkipSampler(aware, EXITS, NUM_LAYERS, seed=3)
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
    other = drawn(SkipSampler(aware, EXITS, NUM_LAYERS, seed=4), ids)
    for skipped in (later, other):
        assert all(what(skipped, row) != what(whole, row) for row in range(4))


def test_draws_do_not_depend_on_padding() -> None:
    # A row is padded to the longest of its batch, so padding tells who else is in the batch.
    skipping = SkipSampler(ExitAware(share=0.5), EXITS, NUM_LAYERS, seed=3)
    ids = random_ids(8, 16)
    mask = torch.arange(16) < torch.arange(9, 17)[:, None]
    labels = torch.where(mask.roll(-1, 1) & mask, ids.roll(-1, 1), IGNORED)
    labels[:, -1] = IGNORED
    padded = drawn(skipping, ids, labels, mask)
    for row in range(8):
        n = 9 + row
        alone = drawn(skipping, ids[row : row + 1, :n], labels[row : row + 1, :n])
        assert padded.may_exit[row, :n].tolist() == alone.may_exit[0].tolist()
        assert not padded.may_exit[row, n:].any()
        assert padded.thresholds[row] == alone.thresholds[0]


def test_only_tokens_to_be_said_and_no_padding_freeze() -> None:
    aware = ExitAware(share=1.0, longest_prompt=0.0)
    skipping = SkipSampler(aware, EXITS, NUM_LAYERS, seed=0)
    ids = random_ids(3, 12)
    # By the chat's own tokens: an answer; two answers and a question between; no answer at all.
    said = torch.zeros(3, 12, dtype=torch.bool)
    said[0, 5:9] = said[1, 3:6] = said[1, 9:12] = True
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[0, 9:] = False
    labels = torch.where(said, ids, IGNORED)
    shifted = torch.cat([labels[:, 1:], torch.full((3, 1), IGNORED)], dim=1)
    skipped = drawn(skipping, ids, shifted, mask)
    # What serving freezes: tokens that were generated, the last of an answer included.
    assert skipped.may_exit.tolist() == said.tolist()
