"""The record of a calibration in a checkpoint: thresholds, and what they promise.

`multi_exit.calibration` in `config.json` is one `Calibration`. Its chosen thresholds are those of
`auto`; its points are thresholds for other targets, which a request names with `exit_target`. Where
several modes were calibrated, it is about the first, and holds what was found for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, replace
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, Strict, TypeAdapter, model_serializer, model_validator
from pydantic.dataclasses import dataclass

from exitserve.errors import ExitServeError

CRITERIA = ("max_prob", "margin", "entropy")
"""How confidence is computed from logits (`exitserve_kernels.exit_check`)."""
CALIBRATED_MODES = ("confidence", "defer")
"""Modes whose thresholds a calibration may choose."""
EXIT_ROWS = FREQUENT, ALL = "frequent", "all"
"""Which rows of the LM head exit checks read (`exitserve.checkpoint.exit_rows`)."""
ROWS_FOLDER = "exit_rows"
"""A folder of its own: loaders read every .safetensors beside the weights."""


def _one_of(allowed: Collection[str]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"allowed: {', '.join(allowed)}")
        return value

    return AfterValidator(check)


# Strict: true is no number, and neither is "0.9". Whole numbers count as numbers.
Layer = Annotated[int, Strict(), Field(ge=1)]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Share = Annotated[Number, Field(gt=0, lt=1)]
Criterion = Annotated[str, _one_of(CRITERIA)]
# The keys of a JSON object are strings.
Thresholds = Mapping[Annotated[int, Field(ge=1)], Annotated[Number, Field(ge=0)]]
"""Exit layer to threshold; other layers are not checked."""


@dataclass(frozen=True, kw_only=True)
class OperatingPoint:
    """Thresholds, and what they were measured to give."""

    agreement: Share | None
    """Promise: at least this share of tokens is full depth's; None: nothing is promised."""
    thresholds: Thresholds
    eos_thresholds: Thresholds
    """For tokens that end the sequence, at the same layers; 1 or more: they never exit."""
    found: Mapping[str, Number] = field(default_factory=dict)
    """Measured on the data of the calibration: `mean_depth`, `agreement`, `perplexity`, `cost`
    (of a token, as a share of full depth's)."""

    def by_name(self) -> dict[str, Thresholds]:
        """Both kinds of thresholds, by their keys in the block."""
        return {"thresholds": self.thresholds, "eos_thresholds": self.eos_thresholds}

    def at(self, exit_layers: Collection[int]) -> OperatingPoint:
        """The thresholds at some of the exit layers, which promise nothing."""
        return OperatingPoint(
            agreement=None,
            thresholds={k: v for k, v in self.thresholds.items() if k in exit_layers},
            eos_thresholds={k: v for k, v in self.eos_thresholds.items() if k in exit_layers},
        )


@dataclass(frozen=True, kw_only=True)
class ModeCalibration:
    """Thresholds for one mode, with their promise."""

    target: str
    """Such as `agreement>=0.99`, `perplexity<=+1%`, `mean_depth<=8`."""
    mode: Annotated[str, _one_of(CALIBRATED_MODES)]
    """The one of `CALIBRATED_MODES` in which the promise holds."""
    chosen: OperatingPoint
    """The thresholds of `auto`."""
    points: tuple[OperatingPoint, ...] = ()
    """Thresholds for other targets, ascending by `agreement`."""

    def by_name(self) -> dict[str, OperatingPoint]:
        """All points, by where their keys are in the block; the chosen one's are in the block."""
        return {"": self.chosen} | {f"points[{i}].": one for i, one in enumerate(self.points)}

    def for_agreement(self, target: float) -> OperatingPoint | None:
        """The cheapest point that promises at least `target`; None where none does."""
        promising = [p for p in (*self.points, self.chosen) if (p.agreement or 0.0) >= target]
        costs = [(p.found.get("cost", 1.0), p.agreement or 0.0, p) for p in promising]
        return min(costs, key=lambda one: one[:2], default=(0.0, 0.0, None))[2]

    def void(self, exit_layers: Collection[int]) -> Self:
        """Its thresholds at these layers, without any promise."""
        return replace(self, chosen=self.chosen.at(exit_layers), points=())

    @model_validator(mode="before")
    @classmethod
    def _from_block(cls, block: Any) -> Any:
        """In a block, the keys of the chosen point stand beside the others."""
        return {**block, "chosen": block} if isinstance(block, dict) else block

    @model_serializer(mode="wrap")
    def _to_block(self, fields_of: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        fields = fields_of(self)
        chosen: dict[str, Any] = fields.pop("chosen")
        unsaid = {"exit_rows": ALL, "agreement_at": {}, "other_modes": []}  # as before
        return chosen | {k: v for k, v in fields.items() if k not in unsaid or v != unsaid[k]}


@dataclass(frozen=True, kw_only=True)
class Calibration(ModeCalibration):
    """What a calibration found for its first mode and for others, and its provenance."""

    criterion: Criterion
    """One of `CRITERIA`."""
    confidence_level: Share
    """Confidence with which each single promise holds."""
    num_layers: Layer
    """Full depth of the calibrated model; promises are about agreement with that depth."""
    exit_rows: Annotated[str, _one_of(EXIT_ROWS)] = ALL
    """The one of `EXIT_ROWS` with which the promise holds."""
    agreement_at: Thresholds = field(default_factory=dict)
    """By exit layer, the share of all tokens that it has right, whatever its confidence: of drafts
    made there, as many would be accepted."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Data (name, hash, size), method, versions, date, for readers."""
    other_modes: tuple[ModeCalibration, ...] = ()
    """The same for other modes, by the same text, criterion and exit rows."""

    def by_mode(self) -> dict[str, ModeCalibration]:
        """What was found, by mode; the first is the one that `auto` means by itself."""
        return {one.mode: one for one in (self, *self.other_modes)}

    def by_name(self) -> dict[str, OperatingPoint]:
        """All points of all modes, by where their keys are in the block."""
        found = super().by_name()
        for i, other in enumerate(self.other_modes):
            found |= {f"other_modes[{i}].{name}": one for name, one in other.by_name().items()}
        return found

    def beside(self, others: Sequence[Calibration]) -> Calibration:
        """With what others found for their modes, by the same text, criterion and exit rows."""
        return replace(
            self,
            other_modes=tuple(
                ModeCalibration(
                    target=one.target, mode=one.mode, chosen=one.chosen, points=one.points
                )
                for one in others
            ),
        )

    def first(self, num_layers: int) -> Calibration:
        """The record for the first layers of the model: thresholds, nothing about agreement."""
        if num_layers >= self.num_layers:
            return self
        note = f"made for {self.num_layers} layers; promises nothing for {num_layers}"
        return replace(
            self.void(range(num_layers)),
            agreement_at={},
            other_modes=tuple(one.void(range(num_layers)) for one in self.other_modes),
            provenance={**self.provenance, "restricted": note},
        )

    @model_validator(mode="after")
    def _has_each_mode_once(self) -> Self:
        places = {self.mode: "mode"}
        for i, one in enumerate(self.other_modes):
            place = f"other_modes[{i}].mode"
            if one.mode in places:
                raise ExitServeError(
                    f"multi_exit.calibration.{places[one.mode]} and multi_exit.calibration.{place} "
                    f"are both {one.mode!r}, but a mode is calibrated once."
                )
            places[one.mode] = place
        return self


def json_of(record: Any) -> dict[str, Any]:
    """A record (a pydantic dataclass) as JSON has it."""
    found: dict[str, Any] = TypeAdapter(type(record)).dump_python(record, mode="json")
    return found
