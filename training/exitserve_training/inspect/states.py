"""One pass of a model over the data, measured at every depth as it goes.

The residual stream after each layer is seen once, and what is kept of it is bounded: sums, the
histograms of condensation, and a sample of positions for what compares layers. Shapes: B rows,
T positions, S positions that say something, N sampled positions, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from exitserve.decoder import capture_hidden
from exitserve_training.inspect.condensation import Condensation
from exitserve_training.inspect.questions import Asked
from exitserve_training.losses import effective_rank, layer_quality
from exitserve_training.losses.chunked import IGNORED
from exitserve_training.parts import ModelParts, model_parts


@dataclass
class Seen:
    """What one pass leaves, by depth 1..L."""

    num_layers: int
    said: int = 0
    """Positions with a label."""
    nats: dict[int, float] = field(default_factory=dict)
    """Sum of cross-entropies through the shared head."""
    right: dict[int, float] = field(default_factory=dict)
    """Sum of right first guesses."""
    ranks: dict[int, float] = field(default_factory=dict)
    """Sum over sequences of effective ranks."""
    ranked: int = 0
    """How many sequences those are of."""
    states: dict[int, list[Tensor]] = field(default_factory=dict)
    labels: list[Tensor] = field(default_factory=list)
    condensation: Condensation | None = None

    def features(self, depth: int) -> Tensor:
        """The sampled states [N, D] at a depth, the same positions at each."""
        return torch.cat(self.states[depth])

    def classes(self) -> Tensor:
        """What the sampled positions are to say [N]."""
        return torch.cat(self.labels)


def watch(model: PreTrainedModel, asked: Asked, samples: int, seed: int) -> Seen:
    """Runs the model over the data.

    Args:
        model: on the device it is to run on, in evaluation mode.
        asked: the data.
        samples: positions to keep for what compares layers, at most, spread over the batches.
        seed: of the draw of positions.
    """
    parts = model_parts(model)
    depths = range(1, parts.num_layers + 1)
    seen = Seen(parts.num_layers, condensation=Condensation(depths))
    generator = torch.Generator().manual_seed(seed)
    a_batch = max(1, -(-samples // len(asked.questions)))
    device = next(model.parameters()).device
    pairs = list(zip(asked.questions, asked.masks, strict=True))
    # disable=None: no bar where the output is not a terminal.
    for question, mask in tqdm(pairs, desc="inspecting", disable=None):
        labels = question.labels.to(device)
        chosen = _drawn(labels, a_batch, generator)
        with torch.no_grad(), capture_hidden(parts.layers, depths) as hidden:
            parts.body(**{name: tensor.to(device) for name, tensor in question.inputs.items()})
        seen.said += int((labels != IGNORED).sum())
        seen.labels.append(labels.flatten()[chosen].cpu())
        for depth in depths:
            _measure(seen, depth, hidden.pop(depth), parts, labels, mask.to(device), chosen)
        seen.ranked += len(labels)
    return seen


def _drawn(labels: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Indices into [B * S] of positions with a label, at most so many."""
    rows = (labels.flatten() != IGNORED).nonzero().squeeze(-1)
    order = torch.randperm(len(rows), generator=generator)[:most].sort().values
    return rows[order.to(rows.device)]


def _measure(
    seen: Seen,
    depth: int,
    hidden: Tensor,
    parts: ModelParts,
    labels: Tensor,
    mask: Tensor,
    chosen: Tensor,
) -> None:
    """Takes the states [B, T, D] of one depth into account."""
    spoken = parts.spoken(hidden)
    count = int((labels != IGNORED).sum())
    nats, right = layer_quality(spoken, parts.head, labels)
    seen.nats[depth] = seen.nats.get(depth, 0.0) + float(nats) * count
    seen.right[depth] = seen.right.get(depth, 0.0) + float(right) * count
    kept = spoken.flatten(0, 1)[chosen].float().cpu()
    seen.states.setdefault(depth, []).append(kept)
    tokens = mask if mask.shape[1] else torch.ones_like(hidden[..., 0], dtype=torch.bool)
    assert seen.condensation is not None
    seen.condensation.add(depth, hidden, tokens)
    ranks = effective_rank(hidden.float(), mask=tokens, reduction="none").sum()
    seen.ranks[depth] = seen.ranks.get(depth, 0.0) + float(ranks)
