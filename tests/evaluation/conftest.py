"""A case and a report as an evaluation gives them, for pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from exitserve.evaluation.oracle import SettingQuality, Tally
from exitserve.evaluation.run import case_of
from exitserve.evaluation.settings import EvalSetting
from exitserve.policy import ExitPolicy

LAYERS = 12


@pytest.fixture
def setting() -> Callable[..., EvalSetting]:
    def make(threshold: float | None = None, mode: str = "confidence") -> EvalSetting:
        if threshold is None:
            return EvalSetting(fields={}, policy=ExitPolicy.off())
        policy = ExitPolicy.confidence(threshold, mode=mode)
        return EvalSetting(fields={}, policy=policy, exit_threshold=threshold)

    return make


@pytest.fixture
def seen(setting) -> Callable[..., SettingQuality]:
    """Of 100 tokens, `early` stopped at layer 3; of those nine in ten agree."""

    def make(
        threshold: float | None = None, mode: str = "confidence", early: int = 0
    ) -> SettingQuality:
        tallies = {
            3: Tally(early, early * 9 // 10, early * 1.0),
            6: Tally(),
            LAYERS: Tally(100 - early, 100 - early, (100 - early) * 2.0),
        }
        return SettingQuality(setting(threshold, mode), tallies)

    return make


@pytest.fixture
def report(seen) -> dict[str, Any]:
    """Full depth, threshold 0.5 and defer 0.5."""
    found = [seen(), seen(0.5, early=40), seen(0.5, "defer", early=20)]
    return {
        "model": "some-model",
        "machine": {"cpu": "a CPU", "cores": 2, "memory_gib": 8.0, "gpus": []},
        "versions": {"python": "3.11"},
        "settings": {
            "num_layers": LAYERS,
            "exit_layers": [3, 6],
            "exit_checks": "screened",
            "criterion": "max_prob",
            "data": {"name": "a.txt", "sha256": "0" * 64, "bytes": 9, "documents": 2},
            "windows": 4,
            "window_tokens": 58,
            "prompt_tokens": 32,
            "decode_tokens": 100,
            "seed": 0,
        },
        "drafting": [
            {
                "exit_layer": 2,
                "agreement": 0.7,
                "steps": [{"drafts": 1, "accepted_per_step": 0.7, "tokens_per_step": 1.7}],
            }
        ],
        "cases": [case_of(one, found[0].whole.perplexity, (3, 6)) for one in found],
    }
