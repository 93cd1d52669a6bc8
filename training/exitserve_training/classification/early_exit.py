"""A classifier with real early exit: rows that are confident leave the batch, the others go on.

Aligned-training paper, section 3 ("Multi-exit model with a single classifier"): one classifier,
applied after each exit layer to the first position's state; an input stops where its confidence,
the largest softmax probability, is above the threshold. There is no cache to keep, so a row
that has left costs nothing more.

Shapes: B rows, T positions, D hidden, C classes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask

from exitserve.errors import ExitServeError
from exitserve_training.losses.head import Classifier
from exitserve_training.parts import model_parts


class ClassPredictions(NamedTuple):
    """The predictions for the rows of a batch."""

    classes: Tensor
    """int64 [B]."""
    confidence: Tensor
    """[B], the largest softmax probability."""
    depth: Tensor
    """int64 [B], layers run."""


class EarlyExitClassifier:
    """Runs a classifier layer by layer, on those rows that are not confident yet."""

    def __init__(
        self,
        model: PreTrainedModel,
        exit_layers: Sequence[int],
        exit_heads: Mapping[int, Classifier] | None = None,
    ) -> None:
        """Takes a model and the depths below its last at which rows can leave.

        Args:
            model: a classifier.
            exit_layers: where rows may leave.
            exit_heads: classifiers of exits that do not use the shared one.

        Raises:
            ExitServeError: it is not a classifier, or an exit layer is out of range.
        """
        self.parts = model_parts(model)
        if self.parts.task != "class":
            raise ExitServeError(
                f"a {type(model).__name__} predicts tokens, not classes; "
                f"serve it with `exitserve serve`."
            )
        bad = [layer for layer in exit_layers if not 1 <= layer < self.parts.num_layers]
        if bad:
            raise ExitServeError(
                f"exit layer {bad[0]} is out of range; choose from 1..{self.parts.num_layers - 1}."
            )
        self.model = model
        self.exit_layers = frozenset(exit_layers)
        self.exit_heads = dict(exit_heads or {})

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor], threshold: float) -> ClassPredictions:
        """Predicts the class of each row.

        Args:
            inputs: what the model takes, B rows.
            threshold: a row leaves at the first exit layer where it is more confident than this;
                1 or more: none does.
        """
        hidden, mask = self._embedded(dict(inputs))
        count = hidden.shape[0]
        rows = torch.arange(count, device=hidden.device)
        classes = torch.zeros(count, dtype=torch.long, device=hidden.device)
        confidence = torch.zeros(count, device=hidden.device)
        depth = torch.full((count,), self.parts.num_layers, device=hidden.device)
        for number, layer in enumerate(self.parts.layers, start=1):
            hidden = layer(hidden, mask)
            is_last = number == self.parts.num_layers
            if not is_last and (number not in self.exit_layers or threshold >= 1.0):
                continue
            confident, best = self._predict(hidden, number)
            leaves = torch.ones_like(best, dtype=torch.bool) if is_last else confident > threshold
            if not leaves.any():
                continue
            gone = rows[leaves]
            classes[gone], confidence[gone], depth[gone] = best[leaves], confident[leaves], number
            stays = ~leaves
            rows, hidden = rows[stays], hidden[stays]
            # Masks are tensors with a row each, or None.
            mask = mask[stays] if isinstance(mask, Tensor) and mask.shape[0] > 1 else mask
            if not len(rows):
                break
        return ClassPredictions(classes, confidence, depth)

    def _predict(self, hidden: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Confidence and class [B] of states [B, T, D]."""
        head = self.exit_heads.get(depth, self.parts.head)
        logits = head(self.parts.predicting(hidden)[:, 0]).float()
        best = logits.softmax(dim=-1).max(dim=-1)
        return best.values, best.indices

    def _embedded(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Any]:
        """States before the first layer [B, T, D], and the attention mask of all layers."""
        body: Any = self.parts.body
        mask = inputs.pop("attention_mask", None)
        hidden: Tensor = body.embeddings(**inputs)
        config = self.model.config
        return hidden, create_bidirectional_mask(config, hidden, mask)
