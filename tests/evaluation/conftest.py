"""A case and a report as an evaluation gives them, for pages and notes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from exitserve.evaluation.oracle import SettingQuality, Tally
from exitserve.evaluation.run import add_retention, case_of, least_retained, notes_on
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
def report(seen, score) -> Callable[..., dict[str, Any]]:
    """Full depth, threshold 0.5 and defer 0.5, with the scores given for each."""

    def make(*values: float, **options: Any) -> dict[str, Any]:
        found = [seen(), seen(0.5, early=40), seen(0.5, "defer", early=20)]
        scores = [[score(value, **options)] for value in values] or [[], [], []]
        cases = [
            case_of(one, given, found[0].whole.perplexity, (3, 6))
            for one, given in zip(found, scores, strict=True)
        ]
        for case in cases:
            add_retention(case, cases[0])
        return {
            "model": "some-model",
            "machine": {"cpu": "a CPU", "cores": 2, "memory_gib": 8.0, "gpus": []},
            "versions": {"python": "3.11"},
            "settings": {
                "num_layers": LAYERS,
                "exit_layers": [3, 6],
                "exit_checks": "paying",
                "criterion": "max_prob",
                "data": {"name": "a.txt", "sha256": "0" * 64, "bytes": 9, "documents": 2},
                "windows": 4,
                "window_tokens": 58,
                "prompt_tokens": 32,
                "decode_tokens": 100,
                "seed": 0,
                "tasks": {
                    "lm_eval": "0.4",
                    "limit": None,
                    "server": "started here",
                    "concurrency": 4,
                }
                if values
                else None,
            },
            "minimum_retention": least_retained(cases),
            "drafting": [
                {
                    "exit_layer": 2,
                    "agreement": 0.7,
                    "steps": [{"drafts": 1, "accepted_per_step": 0.7, "tokens_per_step": 1.7}],
                }
            ],
            "notes": notes_on(cases),
            "cases": cases,
        }

    return make


@pytest.fixture
def score() -> Callable[..., Any]:
    def make(value: float, *, stderr: float | None = 0.05, higher: bool = True, tokens: int = 50):
        from types import SimpleNamespace

        metric = {"value": value, "stderr": stderr, "higher_is_better": higher}
        other = {"value": 7.0, "stderr": None, "higher_is_better": True}
        return SimpleNamespace(
            task="my_task",
            samples=40,
            metrics={"exact_match,none": metric, "other,none": other},
            depths=(3, 12) * (tokens // 2),
        )

    return make
