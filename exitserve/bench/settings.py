"""The job of a comparison, and the settings that it compares with plain vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from exitserve import policy
from exitserve.arguments import drafting_options, exit_fields, in_modes, threshold_label
from exitserve.checkpoint.calibration import FREQUENT
from exitserve.errors import ExitServeError
from exitserve.policy import BY_CONFIDENCE, EXACT, ExitPolicy, ExitRules

Mode = Literal["plain", "off", "confidence", "defer", "verify", "fixed", "rival"]

GPU_SHARE = 0.92
"""Of a GPU's memory, for all engines together: vLLM's default for one."""

Fields = dict[str, Any]
"""A request's extra arguments."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way of serving the same requests."""

    mode: Mode
    exit_threshold: float | str | None = None
    """A number, or a word for calibrated thresholds (`exitserve.arguments.exit_fields`)."""
    exit_layer: int | None = None
    rival: str | None = None
    """Plain vLLM with drafts of another kind (`exitserve.bench.rivals`)."""

    @property
    def exits(self) -> bool:
        """Whether its tokens may stop early."""
        return self.mode not in ("plain", "off", "rival")

    @property
    def label(self) -> str:
        """For tables and plots."""
        if self.mode == "rival":
            return f"vLLM, {(self.rival or '').replace('draft:', 'draft ')}"
        if self.mode in BY_CONFIDENCE:
            return threshold_label(self.mode, self.exit_threshold)
        if self.mode == "fixed":
            return f"exit at {self.exit_layer}"
        return "plain vLLM" if self.mode == "plain" else "exits off"

    def fields(self, count: int) -> list[Fields]:
        """Exit fields of each of the `count` requests of a pass, in the order they are sent.

        Requests at full depth say so too, whatever the engine's default is.
        """
        if self.mode in ("plain", "rival"):
            return [{}] * count
        if self.mode in BY_CONFIDENCE:
            assert self.exit_threshold is not None
            return [exit_fields(self.exit_threshold) | {"exit_mode": self.mode}] * count
        if self.mode == "fixed":
            return [{"exit_layer": self.exit_layer}] * count
        return [{"exit_threshold": 1.0}] * count


def policy_of(fields: Fields, rules: ExitRules) -> ExitPolicy:
    """The policy of a request with these fields; full depth without fields, as plain vLLM is sent.

    Raises:
        ExitServeError: the model does not allow them.
    """
    return rules.policy_for(fields) if fields else ExitPolicy.off()


PLAIN = Setting(mode="plain")
OFF = Setting(mode="off")


@dataclass(frozen=True, kw_only=True)
class BenchJob:
    """What a comparison was asked to do, checked."""

    model_dir: Path
    model_name: str
    rules: ExitRules
    settings: tuple[Setting, ...]
    """Plain vLLM first."""
    batch_sizes: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]
    """Token ids; at least as many as the largest batch."""
    requests: int
    """Requests of a pass; only full batches are sent, at least one."""
    prompt_source: str
    max_tokens: int
    repeats: int
    seconds: float
    """Decoding in each timed pass, at least: a pass of few steps is repeated until then."""
    dtype: str
    enforce_eager: bool
    max_model_len: int | None
    gpu_memory_utilization: float = GPU_SHARE
    """Share of a GPU's memory for all engines together."""
    exit_rows: str = FREQUENT
    """As in `exitserve serve`."""
    num_drafts: int | None = None
    """Tokens that requests may draft at a time; None: as many as pay, by the size of the batch."""
    rivals: tuple[str, ...] = ()
    """Other kinds of drafts on plain vLLM, see `exitserve.bench.rivals`."""
    synthetic: bool = False
    """Whether weights and prompts are random (`benchmarks/synthetic.py`)."""
    forced: Mapping[str, float] | None = None
    """Probabilities that checks pass and drafts are accepted, instead of what the model says."""

    def has_mode(self, *modes: Mode) -> bool:
        """Whether any setting is of one of these modes."""
        return any(setting.mode in modes for setting in self.settings)

    def engine_options(self, *, drafting: bool) -> dict[str, Any]:
        """Exit options of an engine, one that drafts or one that does not."""
        own = draft_layers(self.rules, self.settings) if drafting else self.rules.exit_layers
        options: dict[str, Any] = {"exit_layers": list(own), "exit_rows": self.exit_rows}
        return options | (drafting_options(self.num_drafts) if drafting else {"mode": "off"})

    def requests_in_pass(self, batch_size: int) -> int:
        """How many requests a pass sends at a batch size: full batches, at least one."""
        return max(1, self.requests // batch_size) * batch_size


def make_settings(
    rules: ExitRules,
    thresholds: Sequence[float | str],
    modes: Sequence[policy.Mode] = (),
    fixed_layers: Sequence[int] = (),
) -> tuple[Setting, ...]:
    """Plain vLLM, exits off, then every threshold in its modes (`exitserve.arguments.in_modes`),
    and every layer at which all requests exit.

    Raises:
        ExitServeError: a threshold or layer does not fit, or the model has no exit layers.
    """
    if not rules.exit_layers:
        raise ExitServeError(
            "this model declares no exit layers, so there is nothing to compare; "
            "name some, for example --exit-layers 4,8."
        )
    settings = [PLAIN, OFF]
    settings += [
        Setting(mode=mode, exit_threshold=threshold)
        for mode, threshold in in_modes(rules, thresholds, modes)
    ]
    settings += [Setting(mode="fixed", exit_layer=layer) for layer in fixed_layers]
    for setting in settings:
        if setting.exit_layer is not None:
            policy_of({"exit_layer": setting.exit_layer}, rules)
        elif setting.mode in BY_CONFIDENCE and policy_of(setting.fields(1)[0], rules).mode == "off":
            raise ExitServeError(
                f"threshold {setting.exit_threshold} never exits for this checkpoint; exits off "
                f"is always measured, so leave it out, or give one below 1."
            )
    if len(set(settings)) != len(settings):
        raise ExitServeError("a threshold or a layer is given twice; give each once.")
    return tuple(settings)


def draft_layers(rules: ExitRules, settings: Sequence[Setting]) -> tuple[int, ...]:
    """The exit layer at which an engine drafts for all settings of modes that draft.

    Raises:
        ExitServeError: they draft at different ones.
    """
    policies = [policy_of(one.fields(1)[0], rules) for one in settings if one.mode in EXACT]
    found = {policy.first_exit(rules.exit_layers) for policy in policies} - {None}
    if len(found) > 1:
        raise ExitServeError(
            f"these thresholds draft at different exit layers, {', '.join(map(str, found))}, and a "
            "server drafts at one: compare them in several runs."
        )
    return tuple(one for one in found if one is not None)


def rotated(settings: Sequence[Setting], repeat: int) -> list[Setting]:
    """The order of one repeat: rotated, so that each setting goes first equally often."""
    shift = repeat % len(settings)
    return [*settings[shift:], *settings[:shift]]
