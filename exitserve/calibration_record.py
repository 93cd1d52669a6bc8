"""The record of a calibration in a checkpoint: thresholds, and what they promise.

`multi_exit.calibration` in `config.json` is one `Calibration`. Its chosen thresholds are those of
`auto`; its points are thresholds for other targets, which a request names with `exit_target`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from exitserve.errors import ExitServeError

CRITERIA = ("max_prob", "margin", "entropy", "gate")
"""How confidence is computed: from logits in three ways (`exitserve_kernels.exit_check`), or by a
learned gate, as the probability that full depth agrees."""
CALIBRATED_MODES = ("confidence", "defer")
"""Modes whose thresholds a calibration may choose."""

Thresholds = Mapping[int, float]
"""Exit layer to threshold; other layers are not checked."""


@dataclass(frozen=True, kw_only=True)
class OperatingPoint:
    """Thresholds, and what they were measured to give."""

    agreement: float | None
    """Promise: at least this share of tokens is full depth's; None: nothing is promised."""
    thresholds: Thresholds
    eos_thresholds: Thresholds
    """For tokens that end the sequence, at the same layers; 1 or more: they never exit."""
    found: Mapping[str, float] = field(default_factory=dict)
    """Measured on the data of the calibration: `mean_depth`, `agreement`, `perplexity`, `cost`
    (of a token, as a share of full depth's)."""

    def to_json(self) -> dict[str, Any]:
        """As in `config.json` and in reports."""
        return {
            "agreement": self.agreement,
            "thresholds": {str(layer): value for layer, value in self.thresholds.items()},
            "eos_thresholds": {str(layer): value for layer, value in self.eos_thresholds.items()},
            "found": dict(self.found),
        }

    def at(self, exit_layers: Collection[int]) -> OperatingPoint:
        """The thresholds at some of the exit layers, which promise nothing."""
        return OperatingPoint(
            agreement=None,
            thresholds={k: v for k, v in self.thresholds.items() if k in exit_layers},
            eos_thresholds={k: v for k, v in self.eos_thresholds.items() if k in exit_layers},
        )


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Thresholds with their promise and their provenance."""

    target: str
    """Such as `agreement>=0.99`, `perplexity<=+1%`, `mean_depth<=8`."""
    mode: str
    """The one of `CALIBRATED_MODES` in which the promise holds."""
    criterion: str
    """One of `CRITERIA`."""
    confidence_level: float
    """Confidence with which each single promise holds."""
    num_layers: int
    """Full depth of the calibrated model; promises are about agreement with that depth."""
    chosen: OperatingPoint
    """The thresholds of `auto`."""
    points: tuple[OperatingPoint, ...] = ()
    """Thresholds for other targets, ascending by `agreement`."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Data (name, hash, size), method, versions, date, for readers."""

    def for_agreement(self, target: float) -> OperatingPoint | None:
        """The cheapest point that promises at least `target`; None where none does."""
        promising = [p for p in (*self.points, self.chosen) if (p.agreement or 0.0) >= target]
        costs = [(p.found.get("cost", 1.0), p.agreement or 0.0, p) for p in promising]
        return min(costs, key=lambda one: one[:2], default=(0.0, 0.0, None))[2]

    def first(self, num_layers: int) -> Calibration:
        """The record for the first layers of the model: thresholds, but no promise."""
        if num_layers >= self.num_layers:
            return self
        note = f"made for {self.num_layers} layers; promises nothing for {num_layers}"
        left = self.void([layer for layer in self.chosen.thresholds if layer < num_layers])
        return replace(left, provenance={**self.provenance, "restricted": note})

    def void(self, exit_layers: Collection[int]) -> Calibration:
        """Its thresholds at these layers, without any promise."""
        return replace(self, chosen=self.chosen.at(exit_layers), points=())

    def to_json(self) -> dict[str, Any]:
        """The block for `config.json`."""
        return {
            "target": self.target,
            "mode": self.mode,
            "criterion": self.criterion,
            "confidence_level": self.confidence_level,
            "num_layers": self.num_layers,
            **self.chosen.to_json(),
            "points": [point.to_json() for point in self.points],
            "provenance": dict(self.provenance),
        }


def calibration_of(block: Any) -> Calibration | None:
    """Reads a `multi_exit.calibration` block; None where there is none.

    Raises:
        ExitServeError: it is malformed.
    """
    if block is None:
        return None
    try:
        calibration = Calibration(
            target=str(block["target"]),
            mode=str(block["mode"]),
            criterion=str(block["criterion"]),
            confidence_level=float(block["confidence_level"]),
            num_layers=int(block["num_layers"]),
            chosen=_point_of(block),
            points=tuple(_point_of(point) for point in block.get("points", [])),
            provenance=dict(block.get("provenance", {})),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ExitServeError(
            f"the checkpoint's multi_exit.calibration is malformed ({type(error).__name__}: "
            f"{error}); make it anew with `exitserve calibrate`, or remove it from config.json."
        ) from error
    for name, value, allowed in (
        ("criterion", calibration.criterion, CRITERIA),
        ("mode", calibration.mode, CALIBRATED_MODES),
    ):
        if value not in allowed:
            raise ExitServeError(
                f"multi_exit.calibration has {name} {value!r}; allowed: {', '.join(allowed)}."
            )
    return calibration


def _point_of(block: Mapping[str, Any]) -> OperatingPoint:
    agreement = block["agreement"]
    return OperatingPoint(
        agreement=None if agreement is None else float(agreement),
        thresholds=_thresholds_of(block["thresholds"]),
        eos_thresholds=_thresholds_of(block["eos_thresholds"]),
        found=dict(block.get("found", {})),
    )


def _thresholds_of(block: Mapping[str, Any]) -> dict[int, float]:
    return {int(layer): float(value) for layer, value in block.items()}
