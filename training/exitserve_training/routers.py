"""The balancing loss of a mixture of experts' routers, which a causal LM's own forward would add.

Without it training may send all tokens to a few experts. SimReg's Mixtral and NITP's main table
are such models.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func


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
        loss: Tensor = load_balancing_loss_func(  # type: ignore[assignment]
            output.router_logits, self.num_experts, self.experts_per_token, mask
        )
        return loss


def router_balance(config: PreTrainedConfig) -> RouterBalance | None:
    """The balancing loss of a model, with its own weight; None if there is nothing to balance."""
    sizes: Any = config
    weight = float(getattr(sizes, "router_aux_loss_coef", 0.0))
    if not weight:
        return None
    # Mixtral has another name for it than the others.
    num_experts = getattr(sizes, "num_local_experts", None) or sizes.num_experts
    return RouterBalance(weight, num_experts, sizes.num_experts_per_tok)
