"""The training forward of the models of `make_checkpoint`, and what it skips.

Shapes: B rows, T tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from exitserve_training.forward import ExitPass, MultiExitForward
from exitserve_training.objectives.aligned.options import AlignedOptions
from exitserve_training.objectives.objective import LossInputs, Metrics, Objective
from exitserve_training.objectives.options import BuildContext
from exitserve_training.objectives.registry import AnyObjective
from exitserve_training.objectives.weighted_sum import Objectives
from exitserve_training.parts import model_parts
from exitserve_training.recipe import ExitAware
from exitserve_training.skipping import SkippedPositions, SkipSampler

NUM_LAYERS, EXITS, VOCAB = 6, (2, 4), 128


def random_ids(rows: int, length: int, seed: int = 0) -> Tensor:
    """Token ids [B, T]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (rows, length), generator=generator)


def wrap(
    model: Any, *objectives: AnyObjective, skipping: Any = None, balance: Any = None
) -> MultiExitForward:
    """The training forward around a model, of one aligned loss if no objective is given."""
    parts = model_parts(model)
    context = BuildContext(EXITS, NUM_LAYERS, model.config.hidden_size, parts.head, seed=0)
    built = Objectives(objectives or [AlignedOptions(alternate=False)], context)
    return MultiExitForward(model, parts, built, (*EXITS, NUM_LAYERS), skipping, balance=balance)


def all_skipping() -> SkipSampler:
    """Freezing, so often that every row has some."""
    aware = ExitAware(share=1.0, thresholds=(0.05, 0.3))
    return SkipSampler(aware, EXITS, NUM_LAYERS, seed=0)


class FixedSkips:
    """Stands in for `SkipSampler`: returns skipped positions that a test makes."""

    def __init__(self, make: Callable[[Tensor], SkippedPositions]) -> None:
        self.make = make

    def draw(self, _step: int, _total: int, _ids: Tensor, _labels: Tensor, mask: Tensor) -> Any:
        return self.make(mask)


def at_depths(depth: Tensor) -> FixedSkips:
    """Positions frozen at given depths [B, T]."""

    def make(mask: Tensor) -> SkippedPositions:
        none, thresholds = torch.zeros_like(mask), torch.ones(len(mask))
        skipped = SkippedPositions(EXITS, NUM_LAYERS, mask, none, thresholds)
        skipped.depth = depth.clone()
        return skipped

    return FixedSkips(make)


class Keep(Objective):
    """Keeps the batch it is given; its loss is a fixed random readout of the last layer."""

    batch: LossInputs

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.name, self.weight = "keep", 1.0

    def build(self, _context: BuildContext) -> Objective:
        return self

    def layers(self, step: int) -> Sequence[int]:
        return range(1, NUM_LAYERS + 1)

    def forward(self, batch: LossInputs) -> tuple[Tensor, Metrics]:
        self.batch = batch
        hidden = batch.hidden[NUM_LAYERS]
        generator = torch.Generator().manual_seed(0)
        readout = torch.randn(hidden.shape, generator=generator, dtype=hidden.dtype)
        return (hidden * readout).sum(), {}


def skipped_pass(
    model: Any, skipping: Any, input_ids: Tensor, **inputs: Tensor
) -> tuple[Tensor, LossInputs]:
    """One training pass; returns its loss and what objectives saw. Leaves the model as it was."""
    kept: Any = Keep()
    wrapped = wrap(model, kept, skipping=skipping)
    try:
        loss, _ = model(input_ids=input_ids, **inputs, exit_pass=ExitPass(step=0))
    finally:
        wrapped.remove()
    return loss, kept.batch
