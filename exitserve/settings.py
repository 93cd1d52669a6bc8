"""Settings that commands compare: ways to serve the same requests, by the fields they send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from exitserve import policy
from exitserve.errors import ExitServeError
from exitserve.policy import BY_CONFIDENCE, ExitPolicy, ExitRules

Mode = Literal["plain", "off", "confidence", "defer", "verify", "fixed", "rival"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way of serving the same requests."""

    mode: Mode
    exit_threshold: float | str | None = None
    """A number, or a word for calibrated thresholds (`exit_fields`)."""
    exit_layer: int | None = None
    rival: str | None = None
    """Plain vLLM with drafts of another kind (`exitserve.bench.rivals`)."""

    @property
    def exits(self) -> bool:
        """Whether its tokens may stop early."""
        return self.mode not in ("plain", "off", "rival")

    @property
    def label(self) -> str:
        """For tables and plots: `threshold 0.5`, `defer auto`."""
        if self.mode == "rival":
            return f"vLLM, {(self.rival or '').replace('draft:', 'draft ')}"
        if self.mode in BY_CONFIDENCE:
            name, value = self.mode.replace("confidence", "threshold"), self.exit_threshold
            return f"{name} {value if isinstance(value, str) else format(value, 'g')}"
        if self.mode == "fixed":
            return f"exit at {self.exit_layer}"
        return "plain vLLM" if self.mode == "plain" else "exits off"

    @property
    def fields(self) -> dict[str, Any]:
        """Exit fields of its requests; those at full depth say so, whatever the default is."""
        if self.mode in ("plain", "rival"):
            return {}
        if self.mode in BY_CONFIDENCE:
            assert self.exit_threshold is not None
            return exit_fields(self.exit_threshold) | {"exit_mode": self.mode}
        if self.mode == "fixed":
            return {"exit_layer": self.exit_layer}
        return {"exit_threshold": 1.0}

    def policy(self, rules: ExitRules) -> ExitPolicy:
        """What the fields mean; full depth without fields, as plain vLLM is sent.

        Raises:
            ExitServeError: the model does not allow them.
        """
        return rules.policy_for(self.fields) if self.fields else ExitPolicy.off()


PLAIN = Setting(mode="plain")
OFF = Setting(mode="off")


def label_of(case: Mapping[str, Any]) -> str:
    """Names the setting of a report's case, as in tables and plots."""
    keys = ("mode", "exit_threshold", "exit_layer", "rival")
    return Setting(**{key: case.get(key) for key in keys}).label  # type: ignore[arg-type]


def exit_fields(threshold: float | str) -> dict[str, float | str]:
    """What a request sends for a number, `auto`, or `auto:0.95`: another promised agreement."""
    _, _, target = str(threshold).partition(":")
    return {"exit_target": float(target)} if target else {"exit_threshold": threshold}


def in_modes(
    rules: ExitRules, thresholds: Sequence[float | str], modes: Sequence[policy.Mode]
) -> list[tuple[policy.Mode, float | str]]:
    """Thresholds to compare, each with its modes: numbers first, then calibrated ones.

    Args:
        rules: of the model.
        thresholds: see `exitserve.arguments.thresholds_of`.
        modes: for numbers all of them, or `confidence` if there are none; for calibrated
            thresholds those that were calibrated, or else the one in which a server has them.
    """
    known = () if rules.calibration is None else rules.calibration.by_mode()
    own: list[Any] = [] if rules.calibrated is None else [rules.calibrated.mode]
    calibrated = [mode for mode in modes if mode in known] or own or modes[:1] or ["confidence"]
    by_kind: list[tuple[policy.Mode, float | str]] = []
    for kind, chosen in ((float, modes or ["confidence"]), (str, calibrated)):
        by_kind += [(mode, one) for mode in chosen for one in thresholds if isinstance(one, kind)]
    return by_kind


def make_settings(
    rules: ExitRules, thresholds: Sequence[float | str], modes: Sequence[policy.Mode] = ()
) -> tuple[Setting, ...]:
    """Exits off, and every threshold in its modes (`in_modes`).

    Raises:
        ExitServeError: the model has no exits, or a threshold does not fit or is given twice.
    """
    if not rules.exit_layers:
        raise ExitServeError(
            "this checkpoint declares no exit layers, so there is nothing to compare: "
            "`exitserve plan` tells which exits could pay, `exitserve train` makes them, and "
            "serve, bench and calibrate can be given some (--exit-layers 4,8)."
        )
    chosen = in_modes(rules, thresholds, modes)
    settings = [Setting(mode=mode, exit_threshold=threshold) for mode, threshold in chosen]
    for setting in settings:
        if setting.policy(rules).mode == "off":
            raise ExitServeError(
                f"threshold {setting.exit_threshold} never exits for this checkpoint; full depth "
                f"is always measured, so leave it out, or give one below 1."
            )
    if len(set(settings)) != len(settings):
        raise ExitServeError("a threshold or a mode is given twice; give each once.")
    return (OFF, *settings)
