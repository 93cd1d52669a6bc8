"""The NITP loss: the last layer also predicts the next token's shallow hidden state.

Paper: next implicit token prediction (NITP), "Overall Architecture":

    L_NITP = 1 - cos(P(h_t), z_{t+1}),     L_total = L_NTP + lambda * L_NITP,  lambda = 1

h is the last layer's state and P a projector trained along with the model. The target z is the
state of a shallow layer (about a fifth of the depth: layer 4) at the next position, behind a
stop-gradient: targets come from the same forward pass and are never pulled towards h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn import functional

from exitserve.errors import ExitServeError
from exitserve_training.losses.measures import LARGEST
from exitserve_training.losses.tokens import (
    Reduction,
    at_least_float32,
    check_choice,
    counted_tokens,
    reduced,
    unit_vectors,
)

Distance = Literal["cosine", "mse", "smooth_l1", "kl"]


class Projector(nn.Module):
    """P of the NITP loss, a two-layer MLP: [N, D] to [N, D].

    The paper says "a simple MLP projection head" and no more. SiLU between two linear maps
    without bias is this module's choice, as in the MLPs of the models it is trained with.
    """

    def __init__(self, hidden_size: int, width: int | None = None) -> None:
        """Takes D and the width between the two maps; None for D."""
        super().__init__()
        width = hidden_size if width is None else width
        self.up = nn.Linear(hidden_size, width, bias=False)
        self.down = nn.Linear(width, hidden_size, bias=False)

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
    reduction: Reduction = "mean",
) -> Tensor:
    """Returns the mean distance of projector(hidden) at t to `shallow` at t + target_shift.

    `"cosine"`, 1 - cos in 0..2, is the paper's; the others are its ablations, for which it gives
    no formula. `"mse"` and `"smooth_l1"` (quadratic below 1, linear above) are means over D.
    `"kl"` is KL(softmax(target) || softmax(prediction)) over the D entries, in nats: the target
    is the distribution to be met. With cosine a zero vector is orthogonal to all (distance 1)
    and gets no gradient; the others cut entries beyond `LARGEST`, without gradient.

    Args:
        hidden: states [B, T, D] of the last layer, as P is to read them.
        shallow: states [B, T, D] of the target layer; detached here.
        projector: maps [N, D] to [N, D], called once with all N counted states in their dtype;
            N may be 0.
        target_shift: how many positions ahead the target lies: 1 for the next (the paper's), 0
            for the same (its ablation).
        distance: `"cosine"`, `"mse"`, `"smooth_l1"` or `"kl"`.
        mask: bool [B, T] of positions that count; None for all. A pair (t, t + target_shift)
            counts only if both of its positions do.
        reduction: `"mean"` over counted pairs, or `"none"`: [B, T - target_shift], 0 where the
            pair does not count. Without any pair the loss is 0 with zero gradients.

    Raises:
        ExitServeError: shapes disagree, target_shift is negative, or a name is unknown.
    """
    check_choice("distance", distance, get_args(Distance))
    counted = _counted_pairs(hidden, shallow, target_shift, mask)
    predicted = projector(hidden[:, : counted.shape[1]][counted])
    target = shallow.detach()[:, target_shift:][counted]
    if predicted.shape != target.shape:
        raise ExitServeError(
            f"the projector returned shape {tuple(predicted.shape)} for targets of shape "
            f"{tuple(target.shape)}; it must map [N, D] to [N, D of the target layer]."
        )
    values = _distances(at_least_float32(predicted), at_least_float32(target), distance)
    spread = values.new_zeros(counted.shape).masked_scatter(counted, values)
    return reduced(spread, counted, reduction)


def _counted_pairs(
    hidden: Tensor, shallow: Tensor, target_shift: int, mask: Tensor | None
) -> Tensor:
    """Bool [B, T - target_shift]: pairs (t, t + target_shift) of which both positions count."""
    if hidden.dim() != 3 or hidden.shape[:2] != shallow.shape[:2] or shallow.dim() != 3:
        raise ExitServeError(
            f"hidden has shape {tuple(hidden.shape)} and shallow {tuple(shallow.shape)}; expected "
            f"[B, T, D] of the same tokens."
        )
    if isinstance(target_shift, bool) or not isinstance(target_shift, int) or target_shift < 0:
        raise ExitServeError(
            f"target_shift {target_shift!r} must be a whole number of at least 0: 1 predicts the "
            f"next position's state, 0 the same position's."
        )
    counted = counted_tokens(hidden, mask)
    pairs = max(hidden.shape[1] - target_shift, 0)
    return counted[:, :pairs] & counted[:, target_shift:]


def _distances(predicted: Tensor, target: Tensor, distance: Distance) -> Tensor:
    """[N]: how far each prediction [N, D] lies from its target [N, D]."""
    if distance == "cosine":
        return 1.0 - (unit_vectors(predicted) * unit_vectors(target)).sum(-1)
    predicted, target = predicted.clamp(-LARGEST, LARGEST), target.clamp(-LARGEST, LARGEST)
    if distance == "mse":
        return (predicted - target).square().mean(-1)
    if distance == "smooth_l1":
        return functional.smooth_l1_loss(predicted, target, reduction="none").mean(-1)
    return functional.kl_div(
        predicted.log_softmax(-1), target.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
