"""Every exit's view of a text, and gates that learn from it."""

from __future__ import annotations

import pytest
import torch

from exitserve.agreement import exit_states
from exitserve.calibration.outcomes import Piece, measure_outcome, run_at_full_depth, summarise
from exitserve.calibration.scores import exit_scores, fit_gate, fit_gates
from exitserve.policy import ExitPolicy, Mode
from exitserve.reference import Reference, load_reference


@pytest.fixture(scope="module")
def reference(make_checkpoint) -> Reference:
    return load_reference(str(make_checkpoint("llama")), exit_checks="all")


@pytest.fixture(scope="module")
def pieces() -> list[Piece]:
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 128, (6, 40), generator=drawn).tolist()
    return [Piece(tuple(row), 10, "text") for row in ids]


def test_scores_are_those_of_the_oracles_checks(reference, pieces) -> None:
    """Tokens whose confidence at the first exit is above a threshold are those that leave there."""
    scores = exit_scores(reference, pieces, {}, lambda: None)
    threshold = float(scores[2].confidence["max_prob"].median())
    trace = reference.trace(pieces[0].token_ids, 10, ExitPolicy.confidence(threshold, threshold))
    own = scores[2].confidence["max_prob"][:30] > threshold
    assert 0 < own.sum() < 30
    assert own.tolist() == (trace.depth[10:] == 2).tolist()
    assert set(scores[2].confidence) == {"max_prob", "margin", "entropy"}
    assert len(scores[4].agrees) == 6 * 30


def test_a_gate_learns_what_can_be_learned() -> None:
    drawn = torch.Generator().manual_seed(0)
    states = 3.0 * torch.randn(4000, 16, generator=drawn) + 1.0
    agrees = states[:, 0] - 2.0 * states[:, 3] > 0.5
    gate = fit_gate(states, agrees)
    said = gate.confidence(states)
    assert ((said > 0.5) == agrees).float().mean() > 0.97
    assert said.min() >= 0 and said.max() <= 1
    none = fit_gate(torch.randn(4000, 16, generator=drawn), torch.rand(4000, generator=drawn) < 0.3)
    assert none.confidence(torch.zeros(1, 16)).item() == pytest.approx(0.3, abs=0.05)


def test_gates_stay_where_the_model_is(reference, pieces) -> None:
    gates = fit_gates(reference, pieces, lambda: None)
    assert set(gates) == {2, 4}
    states, _ = exit_states(reference, pieces[0].token_ids, pieces[0].prompt_length)
    assert gates[2].confidence(states[2]).shape == (30,)
    assert gates[2].weight.device == reference.device
    scores = exit_scores(reference, pieces[:1], gates, lambda: None)
    assert torch.equal(scores[2].confidence["gate"], gates[2].confidence(states[2]))


def test_outcomes_of_full_depth_lose_nothing(reference, pieces) -> None:
    found = [
        measure_outcome(reference, piece, run_at_full_depth(reference, piece), ExitPolicy.off())
        for piece in pieces
    ]
    whole = summarise(found)
    assert (whole.agreement, whole.mean_depth, whole.checks, whole.stays) == (1.0, 6.0, 0.0, 1.0)
    assert whole.perplexity == whole.full_perplexity
    fixed = summarise(
        measure_outcome(reference, piece, run_at_full_depth(reference, piece), ExitPolicy.fixed(2))
        for piece in pieces
    )
    assert (fixed.mean_depth, fixed.stays) == (2.0, 0.0)
    assert fixed.agreement < 1.0


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("mode", ["confidence", "defer"])
@pytest.mark.parametrize("first", [2, 4])
def test_layers_below_the_first_check_need_not_run_again(
    make_checkpoint, pieces, family: str, mode: Mode, first: int
) -> None:
    reference = load_reference(str(make_checkpoint(family)))
    piece = pieces[0]
    scores = exit_scores(reference, pieces[:1], {}, lambda: None)
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
