"""A model that does not learn, whose predictions at full depth exits are turned to."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from exitserve.checkpoint.decoder import capture_outputs, hidden_of
from exitserve_training.losses import OutputHead
from exitserve_training.models import load_model
from exitserve_training.parts import model_parts


class FrozenTeacher:
    """No `Module`: neither checkpoints, nor the optimizer, nor sharding shall see its weights."""

    def __init__(
        self, path: str, dtype: torch.dtype = torch.float32, compile_layers: bool = False
    ) -> None:
        """Loads the model of a directory or hub id."""
        self.model = load_model(path, dtype=dtype)
        self.model.requires_grad_(False)
        self.model.train(False)
        self.parts = model_parts(self.model)
        if compile_layers:
            self.parts.compile_layers()

    @property
    def head(self) -> OutputHead:
        """Its norm and head: [N, D] to [N, V]."""
        return self.parts.head

    @torch.no_grad()
    def states(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Un-normed states [B, T, D] after its last layer.

        Args:
            inputs: what the trained model's body was given.
        """
        device = inputs["input_ids"].device
        if self.model.device != device:
            torch.nn.Module.to(self.model, device)
        last = self.parts.num_layers
        no_cache = {"use_cache": False} if self.parts.task == "next token" else {}
        with capture_outputs(self.parts.layers, [last], hidden_of) as captured:
            self.parts.body(**inputs, **no_cache)
        states: Tensor = captured[last]
        return states
