"""What a model is trained to predict: turns batches of a data set into inputs and labels.

Shapes: B rows, T tokens, S positions that predict (T, or 1 for a class), C channels, H and W
pixels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from exitserve_training.draws import Augmentation, Masking
from exitserve_training.losses.tokens import IGNORED


@dataclass(frozen=True)
class TaskBatch:
    """One batch, as the model's body and the objectives take it."""

    inputs: dict[str, Tensor]
    """For the model's body."""
    labels: Tensor
    """[B, S], the token or class of each position; -100 where there is none."""
    mask: Tensor
    """Bool [B, S]: positions that exist, as opposed to padding."""


TaskInputs = Callable[[int | None, Mapping[str, Tensor]], TaskBatch]
"""Turns a batch of a data set into inputs and labels for one task.

It takes the optimizer step (None in evaluation, which is the same whenever it runs), and the
columns of the data set, with `attention_mask` where there is padding.
"""


def next_token(step: int | None, batch: Mapping[str, Tensor]) -> TaskBatch:
    """Each position predicts the next token; see `TaskInputs`."""
    inputs = dict(batch)
    mask = token_mask(batch)
    labels = inputs.pop("labels", batch["input_ids"])
    if "position_ids" in inputs:
        # Packed: models part documents by positions that begin anew, if there is no mask.
        inputs.pop("attention_mask", None)
    return TaskBatch(inputs, shifted_labels(labels, mask), mask)


@dataclass(frozen=True)
class MaskedToken:
    """Positions whose token is masked predict it."""

    masking: Masking

    def __call__(self, step: int | None, batch: Mapping[str, Tensor]) -> TaskBatch:
        """See `TaskInputs`."""
        mask = token_mask(batch)
        input_ids, labels = self.masking(step or 0, batch["input_ids"], mask)
        return TaskBatch({**batch, "input_ids": input_ids}, labels, mask)


def class_of_text(step: int | None, batch: Mapping[str, Tensor]) -> TaskBatch:
    """The first position predicts the class of the text; see `TaskInputs`."""
    inputs = dict(batch)
    return _class_batch(inputs, inputs.pop("labels"))


@dataclass(frozen=True)
class ClassOfImage:
    """The first position predicts the class of the image, which training augments."""

    augmentation: Augmentation | None = None

    def __call__(self, step: int | None, batch: Mapping[str, Tensor]) -> TaskBatch:
        """See `TaskInputs`; the batch has `pixels` [B, C, H, W], normalised."""
        pixels = batch["pixels"]
        if step is not None and self.augmentation is not None:
            pixels = self.augmentation(step, pixels)
        return _class_batch({"pixel_values": pixels}, batch["labels"])


def _class_batch(inputs: dict[str, Tensor], labels: Tensor) -> TaskBatch:
    labels = labels.reshape(-1, 1).long()
    return TaskBatch(inputs, labels, torch.ones_like(labels, dtype=torch.bool))


def token_mask(batch: Mapping[str, Tensor]) -> Tensor:
    """Bool [B, T]: tokens, as opposed to padding."""
    given = batch.get("attention_mask")
    if given is not None and given.dim() == 2:
        return given.bool()
    return torch.ones_like(batch["input_ids"], dtype=torch.bool)


def shifted_labels(input_ids: Tensor, mask: Tensor) -> Tensor:
    """The next token of each position [B, T]; -100 where position or next is no token of `mask`."""
    last = torch.full_like(input_ids[:, :1], IGNORED)
    following = torch.cat([torch.where(mask, input_ids, IGNORED)[:, 1:], last], dim=1)
    return torch.where(mask, following, IGNORED)
