"""Inputs of a classifier, made with the checkpoint's tokenizer or image processor."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from exitserve.windows import load_tokenizer
from exitserve_training.classification.images import ImageReader
from exitserve_training.classification.labelled import Examples, tokenized
from exitserve_training.data_recipe import DataRecipe
from exitserve_training.parts import VISION

Encode = Callable[[Examples], dict[str, Tensor]]
"""Examples to what the model takes."""


def image_processor(model: str | None, config: PreTrainedConfig) -> ViTImageProcessorPil:
    """The model's own, or ViT's, for images of its size and channels."""
    with suppress(OSError):
        if model is not None:
            return ViTImageProcessorPil.from_pretrained(model, size=config.image_size)
    half = [0.5] * int(getattr(config, "num_channels", 3))
    return ViTImageProcessorPil(size=config.image_size, image_mean=half, image_std=half)


def data_format(config: PreTrainedConfig) -> str:
    """The `data.format` of a classifier's inputs."""
    return "images" if config.model_type in VISION else "labelled"


def encoder(model: str, config: PreTrainedConfig, recipe: DataRecipe) -> Encode:
    """How the examples of a classifier, read by a recipe's `data`, become its inputs.

    Raises:
        ExitServeError: it has no tokenizer.
    """
    if config.model_type in VISION:
        reader = ImageReader(recipe, image_processor(model, config))

        def images(examples: Examples) -> dict[str, Tensor]:
            batch = reader([{"image": name, "labels": 0} for name in examples.inputs])
            return {"pixel_values": batch["pixels"]}

        return images
    tokenizer: Any = load_tokenizer(model)
    longest = min(int(config.max_position_embeddings), int(tokenizer.model_max_length))

    def texts(examples: Examples) -> dict[str, Tensor]:
        return dict(tokenized(examples, tokenizer, longest, padding=True, return_tensors="pt"))

    return texts


def batch_rows(examples: Examples, size: int) -> list[list[int]]:
    """Rows of each batch; texts of like length together, so that little is padding."""
    order: Sequence[int] = range(len(examples))
    if examples.inputs and not isinstance(examples.inputs[0], str):
        texts: list[Any] = list(examples.inputs)
        order = sorted(order, key=lambda row: sum(len(text or "") for text in texts[row]))
    return [list(order[start : start + size]) for start in range(0, len(examples), size)]
