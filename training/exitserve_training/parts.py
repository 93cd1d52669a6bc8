"""The parts of a model that training needs: decoders, and encoders trained by masking.

Decoders are taken apart as serving does it (`exitserve.decoder`); encoders can be trained here,
headless or with several exits, but are not served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from exitserve.decoder import FAMILIES, decoder_parts
from exitserve_training.losses import Head

ENCODERS = ("bert",)
"""Hugging Face model types that can be trained as masked language models."""

TRAINABLE = (*FAMILIES, *ENCODERS)


@dataclass(frozen=True)
class ModelParts:
    """A language model taken apart."""

    body: Callable[..., Any]
    """Embeddings and layers: what runs before the head."""
    layers: nn.ModuleList
    norm: Callable[[Tensor], Tensor]
    """The final norm [..., D]; the identity where layers end with their own."""
    head: Head
    """Norm and head: [N, D] to [N, V]."""
    is_causal: bool
    """Whether a position says the next token, rather than its own."""

    @property
    def num_layers(self) -> int:
        """L, the full depth."""
        return len(self.layers)


def model_parts(model: Any) -> ModelParts:
    """Takes a causal or masked language model apart.

    Raises:
        ExitServeError: the model's family is not supported.
    """
    if model.config.model_type in ENCODERS:
        # Encoder layers end with a norm of their own, and the head has its transform.
        head = Head(nn.Identity(), model.cls.predictions)
        return ModelParts(model.bert, model.bert.encoder.layer, nn.Identity(), head, False)
    parts = decoder_parts(model)
    head = Head(parts.norm, parts.head, parts.soft_cap)
    return ModelParts(model.base_model, parts.layers, parts.norm, head, True)
