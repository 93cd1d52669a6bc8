"""The balancing loss of a mixture of experts' routers, which a causal LM's own forward would add.

Without it training may send all tokens to a few experts. SimReg's Mixtral and NITP's main table
are such models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from exitserve.errors import ExitServeError


@dataclass(frozen=True)
class RouterBalance:
    """The loss of Switch Transformers, eq. 4 to 6, over the routers of all layers."""

    weight: float
    num_experts: int
    experts_per_token: int

    def loss(self, output: Any, mask: Tensor) -> Tensor:
        """The unweighted loss: 1 where all experts share tokens alike, E / k where k take all.

        Args:
            output: what the model's body returned for `output_router_logits=True`.
            mask: bool [B, T], tokens as opposed to padding.
        """
        loss: Any = load_balancing_loss_func(
            output.router_logits, self.num_experts, self.experts_per_token, mask
        )
        found: Tensor = loss
        return found


def router_balance(config: PreTrainedConfig, weight: float | None) -> RouterBalance | None:
    """The balancing loss of a model; None where there is nothing to balance.

    Args:
        config: the model's.
        weight: the recipe's `router_aux_loss_coef`; None for the model's own.

    Raises:
        ExitServeError: a weight for a model without routers.
    """
    sizes: Any = config
    if not hasattr(sizes, "router_aux_loss_coef"):
        if weight is not None:
            raise ExitServeError(
                f"recipe key 'router_aux_loss_coef' is for mixtures of experts, and a "
                f"{config.model_type} has no routers; leave it out."
            )
        return None
    weight = float(sizes.router_aux_loss_coef) if weight is None else weight
    # Mixtral has another name for it than the others.
    num_experts = getattr(sizes, "num_local_experts", None) or sizes.num_experts
    return RouterBalance(weight, num_experts, sizes.num_experts_per_tok) if weight else None
