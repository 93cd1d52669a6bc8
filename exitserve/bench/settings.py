"""What a comparison is asked to do, and the settings that it puts beside plain vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from exitserve.errors import ExitServeError
from exitserve.policy import ExitPolicy, ExitRules

Mode = Literal["plain", "off", "confidence", "fixed"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way of serving the same requests."""

    mode: Mode
    exit_threshold: float | None = None
    exit_layer: int | None = None

    @property
    def label(self) -> str:
        """For tables and plots."""
        if self.mode == "confidence":
            return f"threshold {self.exit_threshold:g}"
        if self.mode == "fixed":
            return f"exit at {self.exit_layer}"
        return "plain vLLM" if self.mode == "plain" else "exits off"

    @property
    def fields(self) -> dict[str, Any]:
        """The request's extra arguments; full depth is asked for by name, not by default."""
        if self.mode == "plain":
            return {}
        if self.mode == "fixed":
            return {"exit_layer": self.exit_layer}
        return {"exit_threshold": 1.0 if self.mode == "off" else self.exit_threshold}

    def policy(self, rules: ExitRules) -> ExitPolicy:
        """What the engine makes of `fields`; raises `ExitServeError` if they do not fit."""
        return ExitPolicy.off() if self.mode == "plain" else rules.policy_for(self.fields)

    def checked_layers(self, rules: ExitRules) -> tuple[int, ...]:
        """The exit layers at which a token of this setting is checked, ascending."""
        policy = self.policy(rules)
        return tuple(
            layer
            for layer in rules.exit_layers
            if policy.thresholds_at(layer) != ExitPolicy.off().thresholds_at(layer)
        )


PLAIN = Setting(mode="plain")
OFF = Setting(mode="off")


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """A checked request for a comparison."""

    model_dir: Path
    model_name: str
    synthetic: bool
    rules: ExitRules
    settings: tuple[Setting, ...]
    """Plain vLLM first."""
    batch_sizes: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]
    """Token ids; at least as many as the largest batch."""
    requests: int
    """Sent in a pass, as many as make full batches; at least one batch."""
    prompt_source: str
    max_tokens: int
    repeats: int
    dtype: str
    enforce_eager: bool
    max_model_len: int | None


def make_settings(
    rules: ExitRules, thresholds: Sequence[float], fixed_layers: Sequence[int]
) -> tuple[Setting, ...]:
    """Plain vLLM, exits off, then every threshold and every fixed layer.

    Raises:
        ExitServeError: a threshold or layer does not fit, or the model has no exit layers.
    """
    if not rules.exit_layers:
        raise ExitServeError(
            "this model declares no exit layers, so there is nothing to compare; "
            "name some, for example --exit-layers 4,8."
        )
    settings = [PLAIN, OFF]
    settings += [Setting(mode="confidence", exit_threshold=value) for value in thresholds]
    settings += [Setting(mode="fixed", exit_layer=layer) for layer in fixed_layers]
    for setting in settings:
        policy = setting.policy(rules)
        if setting.mode == "confidence" and policy.mode == "off":
            raise ExitServeError(
                f"threshold {setting.exit_threshold:g} never exits; exits off is always "
                f"measured, so give thresholds below 1."
            )
    if len(set(settings)) != len(settings):
        raise ExitServeError("a threshold or a layer is given twice; give each once.")
    return tuple(settings)


def rotated(settings: Sequence[Setting], repeat: int) -> list[Setting]:
    """The order of one repeat: a later start each time, so that no setting always goes first."""
    shift = repeat % len(settings)
    return [*settings[shift:], *settings[:shift]]
