"""The weighted sum of a run's objectives, each logged by its name."""

import contextlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, distributed, nn

from exitserve.errors import ExitServeError
from exitserve_training.losses.head import Classifier
from exitserve_training.objectives.head_objective import HeadObjective, read_together
from exitserve_training.objectives.objective import LossInputs, Metrics, Objective
from exitserve_training.objectives.options import BuildContext, ObjectiveOptions


class NonFiniteLossError(ExitServeError):
    """An objective's loss is NaN or infinite, in this process or in another."""

    def __init__(self, message: str, process: int = 0) -> None:
        """Takes the message, and the first process that has such a loss."""
        super().__init__(message)
        self.process = process


class Objectives(nn.Module):
    """The weighted sum of objectives; what a run minimises."""

    def __init__(self, chosen: Iterable[ObjectiveOptions], context: BuildContext) -> None:
        """Builds the objectives in the order of the recipe.

        Raises:
            ExitServeError: a layer or a weight does not fit the model.
        """
        super().__init__()
        # The attribute's name is part of the parameters' names in checkpoints.
        self.parts = nn.ModuleDict()
        for options in chosen:
            part = options.build(context)
            earlier = sum(part.name == other.name for other in self.members)
            part.suffix = f"_{earlier + 1}" if earlier else ""
            self.parts[part.name + part.suffix] = part
        for part in self.members:
            if part.weight == 0.0:
                # Measured only: data parallelism must not wait for its gradients.
                part.requires_grad_(False)

    @property
    def members(self) -> list[Objective]:
        """The objectives."""
        return [part for part in self.parts.values() if isinstance(part, Objective)]

    def layers(self, step: int) -> tuple[int, ...]:
        """Depths that any objective needs in this step, ascending."""
        return tuple(sorted({layer for part in self.members for layer in part.layers(step)}))

    def forward(self, batch: LossInputs) -> tuple[Tensor, Metrics]:
        """Returns the weighted sum and all parts' metrics, each loss as `<name>_loss`.

        The second of a name adds `_2` to the names of its metrics.

        Raises:
            NonFiniteLossError: a loss is NaN or infinite; names the objective.
        """
        total = torch.zeros((), device=batch.labels.device)
        metrics: Metrics = {}
        losses: dict[str, Tensor] = {}
        heads = [part for part in self.members if isinstance(part, HeadObjective)]
        together = {part: part.weight for part in heads if part.reads_head}
        if together:
            total, told = read_together(together, batch)
            for name, (loss, found) in told.items():
                losses[name] = loss
                metrics |= found
        for part in self.members:
            if part in together:
                continue
            with torch.set_grad_enabled(torch.is_grad_enabled() and part.weight != 0.0):
                loss, found = part(batch)
            if part.weight != 0.0:
                total = total + part.weight * loss
            metrics |= _suffixed(found, part)
            losses[part.name + part.suffix] = loss.detach()
        _check_finite(losses)
        return total, metrics

    @torch.no_grad()
    def measure(self, batch: LossInputs) -> Metrics:
        """What evaluation reports besides the cross-entropies: each such objective's metrics."""
        metrics: Metrics = {}
        for part in self.members:
            if not part.in_evaluation:
                continue
            # States that are not finite have no singular values; the cross-entropies show them.
            with contextlib.suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]
                metrics |= _suffixed(part(batch)[1], part)
        return metrics

    def measured_layers(self, step: int) -> set[int]:
        """Depths that `measure` needs."""
        measured = [part for part in self.members if part.in_evaluation]
        return {layer for part in measured for layer in part.layers(step)}

    def classifiers(self) -> Mapping[int, Classifier]:
        """Heads by depth that evaluation uses instead of the shared one."""
        found: dict[int, Classifier] = {}
        for part in self.members:
            found |= part.classifiers()
        return found


def _suffixed(found: Metrics, part: Objective) -> Metrics:
    return {name + part.suffix: value for name, value in found.items()}


def _check_finite(losses: Mapping[str, Tensor]) -> None:
    """Raises `NonFiniteLossError` in every process if a loss of any of them is not finite.

    A process that ended alone would leave the others waiting for its gradients.
    """
    several = distributed.is_available() and distributed.is_initialized()
    rank, world = (distributed.get_rank(), distributed.get_world_size()) if several else (0, 1)
    bad = ~torch.stack([loss.float() for loss in losses.values()]).isfinite()
    first = torch.where(bad.any(), rank, world)
    if world > 1:
        distributed.all_reduce(first, op=distributed.ReduceOp.MIN)
    # One transfer from the device for all of them.
    *found, process = torch.cat([bad.long(), first[None]]).tolist()
    if process < world:
        names = [name for name, is_bad in zip(losses, found, strict=True) if is_bad]
        values = ", ".join(f"{name} = {losses[name].item()}" for name in names)
        raise NonFiniteLossError(f"the loss of objective {values}", process)
