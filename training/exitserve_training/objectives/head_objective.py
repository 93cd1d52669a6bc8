"""Objectives that read layers through the shared head, in one pass over the logits for all of them.

Such an objective is a sum of terms: cross-entropies with the labels, or divergences from a
teacher. Each layer's logits are then computed once, whatever number of objectives reads them.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from exitserve_training.losses import Reading, Teacher, head_losses
from exitserve_training.losses.aligned import tokens_at
from exitserve_training.objectives.objective import LossInputs, Metrics, Objective

Kind = Literal["cross_entropy", "divergence"]


@dataclass(frozen=True)
class HeadTerm:
    """The losses of a layer's counted tokens, divided by the number of all labelled ones.

    So a token weighs the same whatever others do, and the sum does not depend on how a batch is
    split.
    """

    kind: Kind
    layer: int
    weight: float


class HeadObjective(Objective):
    """A weighted sum of `HeadTerm`s; one of them at most is of a layer."""

    @property
    def reads_head(self) -> bool:
        """Whether it is a sum of terms, as it was asked for."""
        return True

    @abstractmethod
    def terms(self, step: int) -> Sequence[HeadTerm]:
        """What it is the sum of in this optimizer step."""

    def teacher(self, batch: LossInputs) -> Teacher | None:
        """Of its divergences."""
        return None

    def counted(self, batch: LossInputs, layer: int) -> Tensor:
        """Bool [B, T]: the tokens that count at a layer."""
        return batch.counted(layer)

    def named(self, step: int, loss: Tensor, means: Mapping[int, Tensor]) -> Metrics:
        """What to log.

        Args:
            step: the optimizer step.
            loss: its unweighted loss, detached.
            means: layer to the mean loss of its counted tokens, detached.
        """
        return {f"{self.name}_loss": loss}

    def layers(self, step: int) -> Sequence[int]:
        """See `Objective`."""
        return [term.layer for term in self.terms(step)]

    def forward(self, batch: LossInputs) -> tuple[Tensor, Metrics]:
        """See `Objective`; of this objective alone."""
        total, found = read_together({self: 1.0}, batch)
        return total, found[self.name][1]


def read_together(
    asked: Mapping[HeadObjective, float], batch: LossInputs
) -> tuple[Tensor, dict[str, tuple[Tensor, Metrics]]]:
    """Returns the weighted sum, and by name each objective's own loss, detached, and its metrics.

    Args:
        asked: objectives to their weights; one of them at most has a teacher.
        batch: of one forward pass.
    """
    teachers = [found for one in asked if (found := one.teacher(batch)) is not None]
    assert len(teachers) <= 1, "divergences of a pass have one teacher"
    tokens = batch.labelled.sum().clamp(min=1)
    parts = [
        _Part(one, term, weight, one.counted(batch, term.layer))
        for one, weight in asked.items()
        for term in one.terms(batch.step)
    ]
    layers = sorted({part.term.layer for part in parts})
    # Each mask is asked once, which waits for the device.
    places = functools.cache(lambda mask: tokens_at(mask, batch.labels))
    readings = [
        _reading(batch, layer, [part for part in parts if part.term.layer == layer], places, tokens)
        for layer in layers
    ]
    total, losses = head_losses(readings, batch.classifier, *teachers)
    of_layer = dict(zip(layers, losses, strict=True))
    told: dict[str, tuple[Tensor, Metrics]] = {}
    for one in asked:
        loss, means = total.new_zeros(()), dict[int, Tensor]()
        for part in parts:
            if part.objective is not one:
                continue
            each = getattr(of_layer[part.term.layer], part.term.kind)
            whole = (each * part.share).sum()
            loss = loss + part.term.weight * whole / tokens
            means[part.term.layer] = whole / part.share.sum().clamp(min=1)
        told[one.name] = (loss, one.named(batch.step, loss, means))
    return total, told


@dataclass(eq=False)
class _Part:
    """A term of an objective in one pass."""

    objective: HeadObjective
    term: HeadTerm
    weight: float
    """Of the objective."""
    counted: Tensor
    """Bool [B, T]."""
    share: Tensor = field(init=False)
    """[M]: 1 for tokens of the layer's reading that count, 0 for others."""


def _reading(
    batch: LossInputs, layer: int, parts: Sequence[_Part], tokens_of: Any, tokens: Tensor
) -> Reading:
    """All that is asked of a layer; writes the parts' `share`."""
    counted = parts[0].counted
    for part in parts[1:]:
        counted = counted if part.counted is counted else counted | part.counted
    rows, labels = tokens_of(counted)
    weights: dict[str, Tensor] = {}
    for part in parts:
        own = part.counted.reshape(-1)
        part.share = (own if rows is None else own[rows]).float()
        given = part.share * (part.weight * part.term.weight / tokens)
        kind = part.term.kind
        weights[kind] = given + weights[kind] if kind in weights else given
    states = batch.hidden[layer]
    return Reading(
        states.reshape(-1, states.shape[-1]),
        labels=labels if "cross_entropy" in weights else None,
        cross_entropy=weights.get("cross_entropy"),
        divergence=weights.get("divergence"),
        rows=rows,
    )
