"""Every exit's view of a text."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from exitserve.calibration.exact import ExactOutcomes
from exitserve.calibration.outcomes import Piece, measure_outcome, run_at_full_depth
from exitserve.calibration.scores import ExitScores, all_scores, read_exits
from exitserve.policy import ExitPolicy, Mode
from exitserve.reference import Reference, load_reference


@pytest.fixture(scope="module")
def reference(make_checkpoint) -> Reference:
    return load_reference(str(make_checkpoint("llama")))


@pytest.fixture(scope="module")
def pieces() -> list[Piece]:
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 128, (6, 40), generator=drawn).tolist()
    return [Piece(tuple(row), 10, "text") for row in ids]


def exit_scores(reference, pieces) -> dict[int, ExitScores]:
    return all_scores([read_exits(reference, piece) for piece in pieces])


def test_scores_are_those_of_the_oracles_checks(reference, pieces) -> None:
    """Tokens whose confidence at the first exit is above a threshold are those that leave there."""
    scores = exit_scores(reference, pieces)
    threshold = float(scores[2].confidence["max_prob"].median())
    trace = reference.trace(pieces[0].token_ids, 10, ExitPolicy.confidence(threshold, threshold))
    own = scores[2].confidence["max_prob"][:30] > threshold
    assert 0 < own.sum() < 30
    assert own.tolist() == (trace.depth[10:] == 2).tolist()
    assert set(scores[2].confidence) == {"max_prob", "margin", "entropy"}
    assert len(scores[4].agrees) == 6 * 30


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_with_exact_keys_and_values_one_pass_tells_every_outcome(
    make_checkpoint, pieces, family: str
) -> None:
    reference = load_reference(str(make_checkpoint(family)))
    exact = ExactOutcomes([read_exits(reference, piece) for piece in pieces[:3]])
    seen = set()
    for layer, low, ends in ((2, 0.08, 0.09), (4, 0.1, 0.15), (2, 0.12, math.inf)):
        policy = ExitPolicy(mode="defer", by_layer=((layer, low, ends),))
        for piece, found in zip(pieces, exact.of(reference, policy), strict=False):
            told = measure_outcome(reference, piece, run_at_full_depth(reference, piece), policy)
            unlike = {"nats": 0.0, "full_nats": 0.0, "accepted": 0.0}
            assert replace(found, **unlike) == replace(told, **unlike)
            assert found.accepted >= 1.0 - found.stays
            assert (found.nats, found.full_nats) == pytest.approx((told.nats, told.full_nats))
            seen.add(found.depth)
    assert len(seen) > 4


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("mode", ["confidence", "defer"])
@pytest.mark.parametrize("first", [2, 4])
def test_layers_below_the_first_check_need_not_run_again(
    make_checkpoint, pieces, family: str, mode: Mode, first: int
) -> None:
    reference = load_reference(str(make_checkpoint(family)))
    piece = pieces[0]
    scores = exit_scores(reference, pieces[:1])
    levels = {depth: float(scores[depth].confidence["max_prob"].median()) for depth in (2, 4)}
    policy = ExitPolicy(
        mode=mode,
        by_layer=tuple((depth, one, one) for depth, one in levels.items() if depth >= first),
    )
    ran: list[int] = []
    inner = [next(layer.children()) for layer in reference.parts.layers]
    for depth, module in enumerate(inner, start=1):
        module.register_forward_hook(lambda *_, depth=depth: ran.append(depth))
    whole = measure_outcome(reference, piece, run_at_full_depth(reference, piece), policy)
    kept = run_at_full_depth(reference, piece, keep=reference.exit_layers)
    ran.clear()
    found = measure_outcome(reference, piece, kept, policy)
    assert found == whole and found.depth < len(inner)
    assert sorted(set(ran)) == [*range(first + 1, len(inner) + 1)]
    again = run_at_full_depth(reference, piece)
    assert torch.equal(again.nats, kept.nats), "afterwards all layers run"
