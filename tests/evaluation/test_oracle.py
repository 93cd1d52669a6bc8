"""Perplexity and agreement against plain transformers, on a small model made for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from exitserve.evaluation.oracle import SettingQuality, depth_entries, measure_quality
from exitserve.policy import ExitPolicy, Mode
from exitserve.reference import Reference, load_reference
from exitserve.windows import Window

PROMPT, LENGTH, EXITS, LAYERS = 8, 40, (2, 4), 6
FULL = ExitPolicy.off()


@pytest.fixture(scope="module")
def reference(make_checkpoint: Any) -> Reference:
    path: Path = make_checkpoint("llama")
    return load_reference(str(path), exit_rows="all")


@pytest.fixture(scope="module")
def windows() -> list[Window]:
    generator = torch.Generator().manual_seed(1)
    return [
        Window(tuple(torch.randint(2, 128, (LENGTH,), generator=generator).tolist()), index)
        for index in range(3)
    ]


def by_confidence(threshold: float, mode: Mode = "confidence") -> ExitPolicy:
    return ExitPolicy.confidence(threshold, mode=mode)


def seen_of(
    reference: Reference, windows: Sequence[Window], *policies: ExitPolicy
) -> list[SettingQuality]:
    return measure_quality(reference, windows, PROMPT, policies, lambda: None)


def test_at_full_depth_it_is_the_models_plain_perplexity(reference, windows) -> None:
    losses = []
    for window in windows:
        ids = torch.tensor([window.token_ids])
        labels = ids.clone()
        labels[:, : PROMPT + 1] = -100  # what the prompt says first is no decode token's doing
        with torch.no_grad():
            losses.append(float(reference.model(ids, labels=labels).loss))
    (full,) = seen_of(reference, windows, FULL)
    assert full.whole.tokens == 3 * (LENGTH - PROMPT - 1)
    assert full.whole.perplexity == pytest.approx(math.exp(sum(losses) / 3), rel=1e-5)
    assert full.whole.agreement == 1.0
    assert full.mean_depth == LAYERS
    assert [part["tokens"] for part in depth_entries(full)] == [0, 0, full.whole.tokens]
    assert depth_entries(full)[0]["perplexity"] is None


@pytest.mark.parametrize("mode", ["confidence", "defer"])
def test_a_threshold_is_counted_token_by_token(reference, windows, mode: Mode) -> None:
    """The sums are those of decoding each window on its own, one depth at a time."""
    policy = by_confidence(0.15, mode)
    (seen,) = seen_of(reference, windows, policy)
    tokens, agreeing, nats = 0, 0, 0.0
    for window in windows:
        trace = reference.trace(window.token_ids, PROMPT, policy)
        full = reference.trace(window.token_ids, PROMPT, ExitPolicy.off())
        for at in range(PROMPT, LENGTH - 1):
            chances = trace.logits[at].softmax(dim=-1)
            nats -= math.log(float(chances[window.token_ids[at + 1]]))
            agreeing += int(trace.token[at] == full.token[at])
            tokens += 1
    assert (seen.whole.tokens, seen.whole.agreeing) == (tokens, agreeing)
    assert seen.whole.nats == pytest.approx(nats, rel=1e-4)
    assert EXITS[0] < seen.mean_depth < LAYERS
    assert seen.whole.agreement < 1.0
    assert sum(part["share"] for part in depth_entries(seen)) == pytest.approx(1.0, abs=1e-3)
    assert list(seen.by_depth) == [*EXITS, LAYERS]


def test_deferred_tokens_harm_only_themselves(reference, windows) -> None:
    """With exact keys and values whoever stays to the end says what full depth says."""
    deferred, propagated = seen_of(
        reference, windows, by_confidence(0.15, "defer"), by_confidence(0.15)
    )
    assert deferred.by_depth[LAYERS].tokens > 0
    assert deferred.by_depth[LAYERS].agreement == 1.0
    assert deferred.whole.agreeing > propagated.whole.agreeing


def test_verifying_is_full_depth(reference, windows) -> None:
    full, verified = seen_of(reference, windows, FULL, by_confidence(0.15, "verify"))
    assert verified.whole == full.whole
    assert verified.mean_depth == LAYERS
