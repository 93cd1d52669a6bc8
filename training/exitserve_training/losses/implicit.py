"""The NITP loss: the last layer also predicts the next token's shallow hidden state.

Paper: next implicit token prediction (NITP), "Overall Architecture":

    L_NITP = 1 - cos(P(h_t), z_{t+1}),     L_total = L_NTP + lambda * L_NITP,  lambda = 1

h is the last layer's state and P a projector trained along with the model. The target z is the
state of a shallow layer (about a fifth of the depth: layer 4) at the next position, behind a
stop-gradient: targets come from the same forward pass and are never pulled towards h.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from exitserve_training.losses.spread import LARGEST
from exitserve_training.losses.tokens import at_least_float32, unit_vectors

Distance = Literal["cosine", "mse"]


class Projector(nn.Module):
    """P of the NITP loss, a two-layer MLP: [N, D] to [N, D].

    The paper says "a simple MLP projection head" and no more. SiLU between two square maps
    without bias is this module's choice, as in the MLPs of the models it is trained with.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, hidden_size, bias=False)
        self.down = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the predicted states of `hidden`."""
        predicted: Tensor = self.down(functional.silu(self.up(hidden)))
        return predicted


def nitp(
    hidden: Tensor,
    shallow: Tensor,
    projector: Callable[[Tensor], Tensor],
    *,
    target_shift: int = 1,
    distance: Distance = "cosine",
    mask: Tensor | None = None,
) -> Tensor:
    """Returns the mean distance of projector(hidden) at t to `shallow` at t + target_shift.

    Without any pair it is 0 with zero gradients.

    Args:
        hidden: states [B, T, D] of the last layer, as P is to read them.
        shallow: states [B, T, D] of the target layer; detached here.
        projector: maps [N, D] to [N, D], called once with all N counted states in their dtype;
            N may be 0.
        target_shift: how many positions ahead the target lies: 1 for the next (the paper's), 0
            for the same (its ablation).
        distance: `"cosine"`, 1 - cos in 0..2, is the paper's: a zero vector is orthogonal to all
            and gets no gradient. `"mse"`, its ablation, is the mean over D; entries beyond
            `LARGEST` are cut, without gradient.
        mask: bool [B, T] of positions that count; None for all. A pair (t, t + target_shift)
            counts only if both of its positions do.
    """
    pairs = max(hidden.shape[1] - target_shift, 0)
    counted = torch.ones_like(hidden[..., 0], dtype=torch.bool) if mask is None else mask.bool()
    counted = counted[:, :pairs] & counted[:, target_shift:]
    predicted = at_least_float32(projector(hidden[:, :pairs][counted]))
    target = at_least_float32(shallow.detach()[:, target_shift:][counted])
    if distance == "cosine":
        values = 1.0 - (unit_vectors(predicted) * unit_vectors(target)).sum(-1)
    else:
        off = predicted.clamp(-LARGEST, LARGEST) - target.clamp(-LARGEST, LARGEST)
        values = off.square().mean(-1)
    return values.sum() / max(len(values), 1)
