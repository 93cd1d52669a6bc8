"""The parts of a model that training needs: decoders, masked encoders, and classifiers.

Decoders are taken apart as serving does it (`exitserve.checkpoint.decoder`). Encoders and
classifiers can be trained with several exits too, and classifiers run with early exit
(`exitserve_training.classification`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from exitserve.checkpoint.decoder import FAMILIES, decoder_parts
from exitserve.errors import ExitServeError
from exitserve_training.losses import OutputHead

ENCODERS = ("bert",)
"""Hugging Face model types that can be trained as masked language models, or classify texts."""

VISION = ("deit", "vit")
"""Those that classify images."""

TRAINABLE = (*FAMILIES, *ENCODERS, *VISION)

Task = Literal["next token", "hidden token", "class"]
"""What a model predicts: at each position the next token, or the position's own where it is
masked; or, at the first position, the class of the whole input."""

ENDINGS: dict[Task, tuple[str, ...]] = {
    "next token": ("ForCausalLM", "LMHeadModel"),
    "hidden token": ("ForMaskedLM", "ForPreTraining"),
    "class": ("ForSequenceClassification", "ForImageClassification"),
}
"""How the class names of architectures with the head for a task end."""


@dataclass(frozen=True)
class ModelParts:
    """A model taken apart."""

    body: Callable[..., Any]
    """Embeddings and layers: what runs before the head."""
    layers: nn.ModuleList
    norm: Callable[[Tensor], Tensor]
    """The final norm [..., D]; the identity where layers end with their own."""
    head: OutputHead
    """Norm and head: [N, D] to [N, V]; for a classifier V is the number of classes."""
    task: Task

    @property
    def num_layers(self) -> int:
        """L, the full depth."""
        return len(self.layers)

    def predicting(self, hidden: Tensor) -> Tensor:
        """The states [B, S, D] of the positions that predict, out of all [B, T, D]."""
        return hidden[:, :1] if self.task == "class" else hidden

    def compile_layers(self) -> None:
        """Compiles one layer's code for all; hooks, which read hidden states, stay outside."""
        for layer in self.layers:
            layer.forward = torch.compile(layer.forward)


def model_parts(model: Any) -> ModelParts:
    """Takes a model apart.

    Raises:
        ExitServeError: the model's family or task is not supported.
    """
    family = model.config.model_type
    task = task_of(type(model).__name__)
    if task == "class":
        return _classifier_parts(model, family)
    if family in ENCODERS:
        # Encoder layers end with a norm of their own; the head's transform stands in its place.
        predictions = model.cls.predictions
        head = OutputHead(predictions.transform, predictions.decoder)
        return ModelParts(model.bert, model.bert.encoder.layer, nn.Identity(), head, task)
    parts = decoder_parts(model)
    head = OutputHead(parts.norm, parts.head, parts.soft_cap)
    return ModelParts(model.base_model, parts.layers, parts.norm, head, task)


def task_of(architecture: str) -> Task:
    """The task of a model class; raises `ExitServeError` if it has none of them."""
    for task, endings in ENDINGS.items():
        if architecture.endswith(endings):
            return task
    known = ", ".join(ending for endings in ENDINGS.values() for ending in endings)
    raise ExitServeError(
        f"a {architecture} is not supported; class names of supported ones end in: {known}."
    )


def _classifier_parts(model: Any, family: str) -> ModelParts:
    """For a model that predicts the class at its first position (aligned training, section 2)."""
    if family in ENCODERS:
        pooler = model.bert.pooler
        # One head for all layers: the pooler is part of it, as the final norm is elsewhere.
        head = OutputHead(
            nn.Sequential(pooler.dense, pooler.activation, model.dropout), model.classifier
        )
        return ModelParts(model.bert, model.bert.encoder.layer, nn.Identity(), head, "class")
    if family not in VISION:
        raise ExitServeError(
            f"a {type(model).__name__} is not supported as classifier; supported are those of "
            f"{', '.join((*ENCODERS, *VISION))}."
        )
    body = model.base_model
    return ModelParts(
        body, body.layers, body.layernorm, OutputHead(body.layernorm, model.classifier), "class"
    )
