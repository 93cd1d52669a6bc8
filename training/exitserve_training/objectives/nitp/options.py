"""Options of NITP. Imports no torch."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from exitserve_training.objectives.options import ObjectiveOptions

SHALLOW = 0.2
"""Where the target lies by default, as a share of the depth (the paper's layer 4)."""


class NITPOptions(ObjectiveOptions):
    """The last layer also predicts the next position's shallow state (NITP)."""

    implementation = "exitserve_training.objectives.nitp.objective:NITP"

    name: Literal["nitp"] = "nitp"
    target_layer: Literal["auto"] | int = "auto"
    """`auto` is 20 % of the depth, rounded, at least 1 (the paper's layer 4)."""
    target_shift: int = Field(default=1, ge=0)
    distance: Literal["cosine", "mse"] = "cosine"
    project: bool = True
    """False compares the state itself with the target: no prediction head."""

    def layers_used(self, exit_layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
        """The target and the last layer."""
        if self.target_layer == "auto":
            return (max(1, round(SHALLOW * num_layers)), num_layers)
        return (self._depth(self.target_layer, num_layers), num_layers)
