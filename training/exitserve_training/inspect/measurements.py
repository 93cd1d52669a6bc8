"""Measures every depth of a model in one pass over the data.

The residual stream after each layer is read once, and what is kept of it is bounded: sums, the
histograms of condensation, and a sample of positions for what compares layers. Shapes: B rows,
T positions, S positions that predict, N sampled positions, D hidden.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from exitserve.checkpoint.decoder import capture_hidden
from exitserve.reporting.progress import counted
from exitserve_training.inspect.condensation import Condensation
from exitserve_training.inspect.data import InspectionData
from exitserve_training.losses import effective_rank, mean_cosine, predictions, simreg
from exitserve_training.losses.tokens import IGNORED
from exitserve_training.parts import ModelParts, model_parts

OF_POSITIONS = ("loss", "accuracy", "margin", "contrastive_similarity")
"""Means over positions with a label, of the final norm and head on a depth's states. The last two
are SimReg's: the label's logit less the greatest other, and the loss of figures 2b and 3."""
OF_SEQUENCES = ("effective_rank", "normed_cosine")
"""Means over sequences: of the states, and, as in SimReg's figure 1, of what the head reads."""


@dataclass
class LayerMeasurements:
    """Sums and samples of one pass, by depth 1..L."""

    num_layers: int
    condensation: Condensation
    labelled: int = 0
    """Positions with a label."""
    sequences: int = 0
    sums: dict[int, Tensor] = field(default_factory=dict)
    """Of `OF_POSITIONS` and `OF_SEQUENCES`, in float64."""
    states: dict[int, list[Tensor]] = field(default_factory=dict)
    labels: list[Tensor] = field(default_factory=list)

    def means(self, depth: int) -> dict[str, float]:
        """`OF_POSITIONS` and `OF_SEQUENCES` at a depth."""
        of = dict.fromkeys(OF_POSITIONS, self.labelled)
        of |= dict.fromkeys(OF_SEQUENCES, self.sequences)
        found = zip(of, of.values(), self.sums[depth].tolist(), strict=True)
        return {name: total / max(count, 1) for name, count, total in found}

    def features(self, depth: int) -> Tensor:
        """The sampled states [N, D] at a depth, the same positions at each."""
        return torch.cat(self.states[depth])

    def classes(self) -> Tensor:
        """The labels of the sampled positions [N]."""
        return torch.cat(self.labels)


@torch.no_grad()
def measure_layers(
    model: PreTrainedModel, data: InspectionData, samples: int, seed: int
) -> LayerMeasurements:
    """Runs the model over the data and measures each depth.

    Args:
        model: on the device it is to run on, in evaluation mode.
        data: what the model reads.
        samples: positions to keep for what compares layers, at most, spread over the batches.
        seed: of the draw of positions.
    """
    parts = model_parts(model)
    depths = range(1, parts.num_layers + 1)
    measured = LayerMeasurements(parts.num_layers, Condensation(depths))
    generator = torch.Generator().manual_seed(seed)
    per_batch = max(1, -(-samples // len(data.batches)))
    device = next(model.parameters()).device
    for batch in counted(data.batches, "inspecting"):
        labels = batch.labels.to(device)
        mask = batch.inputs.get("attention_mask")
        mask = None if mask is None else mask.bool().to(device)
        chosen = _drawn(labels, per_batch, generator)
        with capture_hidden(parts.layers, depths) as hidden:
            parts.body(**{name: tensor.to(device) for name, tensor in batch.inputs.items()})
        measured.labelled += int((labels != IGNORED).sum())
        measured.labels.append(labels.flatten()[chosen].cpu())
        for depth in depths:
            _measure(measured, depth, hidden.pop(depth), parts, labels, mask, chosen)
        measured.sequences += len(labels)
    return measured


def _drawn(labels: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Indices into [B * S] of positions with a label, at most so many."""
    rows = (labels.flatten() != IGNORED).nonzero().squeeze(-1)
    order = torch.randperm(len(rows), generator=generator)[:most].sort().values
    return rows[order.to(rows.device)]


def _measure(
    measured: LayerMeasurements,
    depth: int,
    hidden: Tensor,
    parts: ModelParts,
    labels: Tensor,
    mask: Tensor | None,
    chosen: Tensor,
) -> None:
    """Adds the states [B, T, D] of one depth; without a mask there is no padding."""
    states = parts.predicting(hidden)
    said, normed = predictions(states, parts.head, labels), parts.norm(hidden)
    kept = states.flatten(0, 1)[chosen].float().cpu()
    measured.states.setdefault(depth, []).append(kept)
    measured.condensation.add(depth, hidden, mask)
    found = [
        said.nats.sum(),
        said.right.sum(),
        said.margin.sum(),
        simreg(parts.predicting(normed), labels) * len(said.nats),
        effective_rank(hidden.float(), mask=mask) * len(labels),
        mean_cosine(normed, mask=mask) * len(labels),
    ]
    sums = torch.tensor([float(one) for one in found], dtype=torch.float64)
    measured.sums[depth] = sums + measured.sums.get(depth, 0.0)
