"""The job of an evaluation, and the settings whose quality it compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exitserve.arguments import exit_fields, in_modes, threshold_label
from exitserve.errors import ExitServeError
from exitserve.policy import ExitPolicy, ExitRules, Mode
from exitserve.windows import Documents

TRACED_TOKENS = 64
"""Most tokens of an answer that is traced."""
SEED = 0
"""Of the choice of windows."""


@dataclass(frozen=True, kw_only=True)
class EvalSetting:
    """The exit fields that all requests send; an evaluation's first setting is full depth."""

    fields: Mapping[str, Any]
    """Exit fields, as requests send them."""
    policy: ExitPolicy
    """What the fields mean for this model."""
    exit_threshold: float | str | None = None
    """As it was given: a number or a word (`exit_fields`); None for full depth."""

    @property
    def label(self) -> str:
        """For tables and plots."""
        return label_of(self.policy.mode, self.exit_threshold)


def label_of(mode: str, exit_threshold: float | str | None) -> str:
    """Names a setting by its mode and threshold; None is full depth."""
    return "full depth" if exit_threshold is None else threshold_label(mode, exit_threshold)


@dataclass(frozen=True, kw_only=True)
class EvalJob:
    """What an evaluation was asked to do, checked."""

    model: str
    """As it was given: a directory or a hub id."""
    directory: Path
    """Its files."""
    rules: ExitRules
    exit_rows: str
    settings: tuple[EvalSetting, ...]
    """Full depth first."""
    documents: Documents | None
    """Held-out text, if quality is to be measured."""
    window: int
    """Tokens of a window."""
    prompt_tokens: int
    """How many of them are the prompt, at full depth."""
    windows: int
    """Most windows."""
    prompt: str | None
    """A text to continue, for traces."""


def make_settings(
    rules: ExitRules, thresholds: Sequence[float | str], modes: Sequence[Mode]
) -> tuple[EvalSetting, ...]:
    """Full depth, and every threshold in its modes (`exitserve.arguments.in_modes`).

    Raises:
        ExitServeError: the model has no exits, or a threshold does not fit or is given twice.
    """
    if not rules.exit_layers:
        raise ExitServeError(
            "this checkpoint declares no exit layers, so there is nothing to compare: "
            "`exitserve plan` tells which exits could pay, and `exitserve train` makes them."
        )
    if len(set(thresholds)) != len(thresholds) or len(set(modes)) != len(modes):
        raise ExitServeError("a threshold or a mode is given twice; give each once.")
    settings = [EvalSetting(fields={"exit_threshold": 1.0}, policy=ExitPolicy.off())]
    for mode, value in in_modes(rules, thresholds, modes):
        fields = exit_fields(value) | {"exit_mode": mode}
        policy = rules.policy_for(fields).drafting(rules.exit_layers)
        if policy.mode == "off":
            raise ExitServeError(
                f"threshold {value} never exits for this checkpoint; full depth is always "
                f"measured, so leave it out."
            )
        settings.append(EvalSetting(fields=fields, policy=policy, exit_threshold=value))
    if len(settings) == 1:
        raise ExitServeError("--thresholds names none; give numbers below 1, or auto.")
    return tuple(settings)
