"""Exit policies: when the tokens of a request exit, and how request fields become a policy.

Needs neither vLLM nor tensors, so the oracle, the engine and the server share it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from exitserve.checkpoint.calibration import Calibration, ModeCalibration, OperatingPoint
from exitserve.errors import ExitServeError, nearest, shown

Mode = Literal["off", "confidence", "defer", "verify", "fixed"]
MODES: tuple[Mode, ...] = get_args(Mode)
DECIDED: tuple[Mode, ...] = ("confidence", "defer")
"""Modes in which exits decide tokens by their confidence."""
BY_CONFIDENCE: tuple[Mode, ...] = (*DECIDED, "verify")
"""Modes in which a token exits where its confidence passes a threshold."""
EXACT: tuple[Mode, ...] = ("defer", "verify")
"""Modes in which the deeper layers of an exited token run too, later."""
TRANSFERABLE: tuple[Mode, ...] = ("off", "verify")
"""Modes in which what vLLM counts as computed is full depth's in all layers, as KV connectors take
it to be: some name blocks by their tokens, not by policy, and none comes back for a layer."""


EXIT_MODES: tuple[Mode, ...] = ("off", *BY_CONFIDENCE)
"""What a request may send as `exit_mode`."""

DRAFT_SOURCES: dict[str, tuple[str, ...]] = {
    "both": ("text", "layers"),
    "text": ("text",),
    "layers": ("layers",),
    "none": (),
}
"""What a request may send as `exit_drafts`, and where its drafts then come from."""

NUM_DRAFTS = 8
"""Most tokens drafted in a row, by default."""

NUMBERS = (int, float)
"""Types of thresholds, and none derived from them: booleans mean something else, and numpy's do not
reach vLLM's engine, which would wait for the request for ever."""

NEVER = math.inf
"""A threshold no confidence passes."""
ALWAYS = -1.0
"""A threshold every confidence passes."""

AUTO = "auto"
"""As a threshold: those that the checkpoint was calibrated to."""

FIELDS = {
    "exit_threshold": "a token exits where its confidence is above this number (1 or more: "
    "never); auto: above the checkpoint's calibrated thresholds",
    "exit_target": "instead of a threshold: the share of tokens, such as 0.98, that must be those "
    "of full depth; the checkpoint's calibration has the thresholds that keep it",
    "exit_layer": "every decode token exits at this layer, which must be one of the exit layers",
    "exit_mode": "confidence: tokens exit early, and their deeper keys and values are "
    "approximated; verify: the first layers draft and full depth judges, so the answer is full "
    "depth's; defer: the same, but drafts above the threshold are final; off: full depth",
    "exit_drafts": "where drafts come from, which changes no token: text (what followed the same "
    "tokens earlier in the request), layers (the first layers), both (text where there is any, "
    "else layers: the default), none",
    "exit_trace": "true: the response tells the depth at which each token stopped",
}


@dataclass(frozen=True, kw_only=True)
class ExitPolicy:
    """When a request's tokens exit. Made by `off`, `confidence`, `calibrated` or `fixed`."""

    mode: Mode = "off"
    threshold: float = NEVER
    eos_threshold: float = NEVER
    by_layer: tuple[tuple[int, float, float], ...] = ()
    """(exit layer, threshold, threshold for end of sequence) where layers have thresholds of
    their own; other layers are not checked then."""
    exit_layer: int | None = None

    @classmethod
    def off(cls) -> ExitPolicy:
        """Full depth for every token."""
        return cls()

    @classmethod
    def confidence(
        cls, threshold: float, eos_threshold: float | None = None, *, mode: Mode = "confidence"
    ) -> ExitPolicy:
        """Exit at the first exit layer whose confidence is above `threshold`.

        Mode "defer" computes the keys and values of the layers not run exactly, later, instead of
        propagating them at once. In mode "verify" tokens that exit are drafts, which full depth
        accepts or replaces.

        A wrong end of sequence does the most damage, so it needs a confidence above
        `eos_threshold`, by default half way between `threshold` and 1. A threshold of 1 or more
        is full depth.
        """
        if threshold >= 1.0:
            return cls.off()
        if eos_threshold is None:
            eos_threshold = (1.0 + threshold) / 2.0
        assert mode in BY_CONFIDENCE
        return cls(mode=mode, threshold=threshold, eos_threshold=max(threshold, eos_threshold))

    @classmethod
    def calibrated(
        cls, point: OperatingPoint, eos_threshold: float | None = None, *, mode: Mode
    ) -> ExitPolicy:
        """Exit by calibrated thresholds; `eos_threshold` replaces those for end of sequence."""
        assert mode in BY_CONFIDENCE
        by_layer = []
        for layer, threshold in sorted(point.thresholds.items()):
            ends = point.eos_thresholds.get(layer, NEVER)
            ends = ends if eos_threshold is None else eos_threshold
            if threshold < 1.0:
                ends = max(threshold, ends) if ends < 1.0 else NEVER
                by_layer.append((layer, threshold, ends))
        if not by_layer:
            return cls.off()
        return cls(mode=mode, by_layer=tuple(by_layer))

    @classmethod
    def fixed(cls, exit_layer: int) -> ExitPolicy:
        """Every decode token exits at `exit_layer`, end of sequence included."""
        return cls(mode="fixed", exit_layer=exit_layer)

    def thresholds_at(self, layer: int) -> tuple[float, float]:
        """The thresholds (any token, end of sequence) that apply after `layer` layers."""
        if self.by_layer:
            own = (pair for exit_layer, *pair in self.by_layer if exit_layer == layer)
            threshold, ends = next(own, (NEVER, NEVER))
            return threshold, ends
        if self.mode in BY_CONFIDENCE:
            return self.threshold, self.eos_threshold
        if self.mode == "fixed" and layer == self.exit_layer:
            return ALWAYS, ALWAYS
        return NEVER, NEVER

    def first_exit(self, exit_layers: Sequence[int]) -> int | None:
        """The first of some layers at which its tokens may exit; None if none may."""
        return next((one for one in exit_layers if self.thresholds_at(one)[0] < NEVER), None)

    def drafting(self, exit_layers: Sequence[int]) -> ExitPolicy:
        """This policy on a server that drafts, by the layers up to the first exit alone."""
        layer = self.first_exit(exit_layers)
        if self.mode not in EXACT or layer is None:
            return self
        return replace(self, by_layer=((layer, *self.thresholds_at(layer)),))

    def cache_salt(self) -> str | None:
        """A salt for prefix-cache hashes; None where keys and values are exact.

        Propagated keys and values are approximations. With the salt, only requests of the same
        policy read them.
        """
        if self.mode == "confidence":
            own = ":".join(map(repr, (self.threshold, self.eos_threshold, *self.by_layer)))
            return f"exit:confidence:{own}"
        if self.mode == "fixed":
            return f"exit:fixed:{self.exit_layer}"
        return None


@dataclass(frozen=True, kw_only=True)
class ExitRules:
    """What a served model allows, and the policy of requests that ask for nothing."""

    num_layers: int
    exit_layers: tuple[int, ...]
    default: ExitPolicy = ExitPolicy()
    eos_threshold: float | None = None
    """Overrides the end-of-sequence threshold of `ExitPolicy.confidence`."""
    num_drafts: int = 0
    """Tokens that a request may draft at a time; 0: none does."""
    exits_up_to: int | None = None
    """Most requests, itself included, that run when one begins that may exit; None: any number."""
    modes: tuple[Mode, ...] = ("off", "confidence", "defer", "fixed")
    """What this server serves: which of its loops runs decides that."""
    criterion: str = "max_prob"
    """How confidence is computed: one of `exitserve.checkpoint.calibration.CRITERIA`."""
    rows_file: str | None = None
    """The file of the exit rows that checks read (`MultiExit.rows_file`); None: the whole head."""
    logits_processors: bool = False
    """Whether the server has logits processors of its user's, which see all tokens' logits."""
    calibration: Calibration | None = None
    """The thresholds of `auto` and `exit_target`; None where the checkpoint has none."""
    transfers: bool = False
    """Whether a KV connector carries keys and values from and to other servers."""

    def policy_for(
        self, fields: Mapping[str, Any] | None, *, structured: bool = False
    ) -> ExitPolicy:
        """Turns a request's `exit_*` fields into its policy.

        Args:
            fields: the request's extra arguments; those not named `exit_*` are ignored.
            structured: the request constrains its output by a grammar; it then runs at full
                depth unless it asks for exits, or full depth decides every token anyway.

        Raises:
            ExitServeError: a field is unknown, of the wrong type or out of range, or two of them
                contradict each other.
        """
        given = {k: v for k, v in (fields or {}).items() if k.startswith("exit_")}
        for name in given:
            if name not in FIELDS:
                raise ExitServeError(
                    f"unknown field {shown(name)}.{nearest(name, FIELDS)} "
                    f"Known fields: {', '.join(FIELDS)}."
                )
        self._check_drafts(given)
        threshold, layer = given.get("exit_threshold"), given.get("exit_layer")
        mode, target = given.get("exit_mode"), given.get("exit_target")
        self._check_together(given)
        if layer is not None:
            self._check_served("fixed")
            return ExitPolicy.fixed(self._check_layer(layer))
        if mode is None and threshold is None and target is None:
            full_depth_decides = self.default.mode in ("verify", "off")
            return self.default if full_depth_decides or not structured else ExitPolicy.off()
        mode = self._mode(mode, calibrated=threshold == AUTO or target is not None)
        if target is not None:
            return self._by_target(target, mode)
        if threshold == AUTO and mode != "off":
            return self._calibrated(self._record(mode).chosen, mode)
        return self._by_confidence(mode, threshold)

    @property
    def calibrated(self) -> ModeCalibration | None:
        """What calibrated thresholds are for requests that name no mode; None without any.

        They are those of the server's own mode, or else of the first mode that was calibrated and
        is served.
        """
        if self.calibration is None:
            return None
        found = self.calibration.by_mode()
        own = found.get(self.default.mode)
        served = [record for mode, record in found.items() if mode in self.modes]
        return own or next(iter(served), self.calibration)

    @staticmethod
    def _check_together(given: Mapping[str, Any]) -> None:
        """Refuses fields that contradict each other."""
        for one, others in (
            ("exit_layer", ("exit_threshold", "exit_target", "exit_mode")),
            ("exit_target", ("exit_threshold",)),
        ):
            for other in others:
                if given.get(one) is not None and given.get(other) is not None:
                    raise ExitServeError(f"{other} and {one} exclude each other; send one of them.")

    def _check_drafts(self, given: Mapping[str, Any]) -> None:
        """Refuses an unknown `exit_drafts`, and any where nothing is drafted."""
        if "exit_drafts" not in given:
            return
        if str(given["exit_drafts"]) not in DRAFT_SOURCES:
            raise ExitServeError(
                f"exit_drafts must be one of {', '.join(DRAFT_SOURCES)}, not "
                f"{shown(given['exit_drafts'])}."
            )
        if not self.num_drafts:
            raise ExitServeError(
                "exit_drafts needs a server that drafts: exitserve serve --mode verify or --mode "
                "defer. Leave it out."
            )

    def _mode(self, mode: Any, *, calibrated: bool) -> Mode:
        """The mode of a request that names a mode, a threshold, or both."""
        if mode is None:
            if calibrated:
                mode = (self.calibrated or self._calibration()).mode
            else:
                mode = self.default.mode if self.default.mode in BY_CONFIDENCE else "confidence"
        if mode not in EXIT_MODES:
            raise ExitServeError(
                f"exit_mode must be one of {', '.join(EXIT_MODES)}, not {shown(mode)}."
            )
        self._check_served(mode)
        return mode  # type: ignore[no-any-return]  # one of EXIT_MODES

    def _check_served(self, mode: Mode) -> None:
        """Refuses a mode that this server does not serve."""
        if mode in self.modes:
            return
        what, flag = f"exit_mode {mode!r}", f"--mode {mode}"
        if mode == "fixed":
            what, flag = "exit_layer", "--exit-layer N"
        if self.transfers and mode not in TRANSFERABLE:
            raise ExitServeError(
                f"{what} needs a server without KV transfer, which carries full depth's keys and "
                f"values only. Modes here: {', '.join(self.modes)}."
            )
        raise ExitServeError(
            f"{what} needs a server that was started for it: exitserve serve {flag}. "
            f"Modes here: {', '.join(self.modes)}."
        )

    def _calibration(self) -> Calibration:
        if self.calibration is None:
            raise ExitServeError(
                "exit_threshold 'auto' and exit_target need a calibrated checkpoint, and this one "
                "is not: run exitserve calibrate on it, or send a threshold as a number."
            )
        return self.calibration

    def _record(self, mode: Mode) -> ModeCalibration:
        """What the calibration found for a mode.

        In mode "verify" full depth decides every token, whatever the thresholds; drafts see exact
        keys and values, as in mode "defer".
        """
        found = self._calibration().by_mode()
        if mode == "verify":
            return found.get("defer", self._calibration())
        if mode not in found:
            raise ExitServeError(
                f"exit_mode {mode!r} does not go with calibrated thresholds, which were chosen in "
                f"mode {' and '.join(map(repr, found))}: leave exit_mode out, or send a threshold "
                "as a number."
            )
        return found[mode]

    def _calibrated(self, point: OperatingPoint, mode: Mode) -> ExitPolicy:
        return ExitPolicy.calibrated(point, self.eos_threshold, mode=mode)

    def _by_target(self, target: Any, mode: Mode) -> ExitPolicy:
        """The policy that promises an agreement; full depth where no thresholds promise it."""
        if type(target) not in NUMBERS or not 0 < target < 1:
            raise ExitServeError(
                f"exit_target must be a number above 0 and below 1, such as 0.98, not "
                f"{shown(target)}."
            )
        self._calibration()
        point = None if mode == "off" else self._record(mode).for_agreement(float(target))
        return ExitPolicy.off() if point is None else self._calibrated(point, mode)

    def _by_confidence(self, mode: Mode, threshold: Any) -> ExitPolicy:
        """The policy of a request with a threshold, which is the server's by default."""
        number = None if threshold is None or threshold == AUTO else check_threshold(threshold)
        if mode == "off":
            return ExitPolicy.off()
        if number is not None:
            return ExitPolicy.confidence(number, self.eos_threshold, mode=mode)
        own = self.default
        if own.by_layer and mode in (own.mode, "verify"):
            return replace(own, mode=mode)
        if own.by_layer and self.calibration is not None and mode in self.calibration.by_mode():
            return self._calibrated(self._record(mode).chosen, mode)
        if own.mode in BY_CONFIDENCE and not own.by_layer:
            return ExitPolicy.confidence(own.threshold, self.eos_threshold, mode=mode)
        raise ExitServeError(f"exit_mode {mode!r} needs a threshold: send exit_threshold with it.")

    def policy_or_off(self, fields: Mapping[str, Any] | None, *, structured: bool) -> ExitPolicy:
        """`policy_for`, with full depth instead of an error.

        For the engine, which a bad request that passed all checks must not stop.
        """
        try:
            return self.policy_for(fields, structured=structured)
        except ExitServeError:
            return ExitPolicy.off()

    def _check_layer(self, layer: Any) -> int:
        if type(layer) is not int:
            raise ExitServeError(f"exit_layer must be a whole number, not {shown(layer)}.")
        if layer not in self.exit_layers:
            allowed = ", ".join(map(str, self.exit_layers)) or "none: this model has no exit layers"
            raise ExitServeError(
                f"exit_layer {shown(layer)} is not one of this model's exit layers ({allowed}); "
                f"for full depth send exit_threshold 1."
            )
        return layer


def check_threshold(value: Any, name: str = "exit_threshold") -> float:
    """Returns a threshold as float.

    Raises:
        ExitServeError: `value` is not a finite number above 0, of `NUMBERS`.
    """
    # `value < inf` rather than math.isfinite, which overflows on huge integers.
    if type(value) not in NUMBERS or not 0 < value < math.inf:
        raise ExitServeError(
            f"{name} must be a finite number above 0 (1 or more: never exit), not {shown(value)}."
        )
    return float(min(value, 1e9))


def finite(threshold: float) -> float | None:
    """A threshold as JSON has it: None for one that no confidence passes."""
    return None if threshold == NEVER else threshold
