"""Inputs of a classifier, made with the checkpoint's tokenizer or image processor."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor
from transformers import ImageProcessingMixin, PreTrainedConfig

from exitserve.windows import load_tokenizer
from exitserve_training.classification.images import ImageReader
from exitserve_training.classification.labelled import Examples, tokenized
from exitserve_training.data_recipe import DataRecipe
from exitserve_training.parts import VISION
from exitserve_training.tasks import ClassOfImage

HALF = (0.5, 0.5, 0.5)
"""Default mean and deviation of image channels (ViT's)."""

Encode = Callable[[Examples], dict[str, Tensor]]
"""Examples to what the model takes."""


def channel_statistics(model: str | None, count: int) -> tuple[list[float], list[float]]:
    """Mean and deviation of image channels in 0..1: of a `preprocessor_config.json`, else ViT's."""
    known: dict[str, Any] = {}
    if model is not None:
        with suppress(OSError):
            known, _ = ImageProcessingMixin.get_image_processor_dict(model)
    mean, std = (known.get(key) or HALF[:count] for key in ("image_mean", "image_std"))
    return list(mean), list(std)


def image_side(config: PreTrainedConfig) -> int:
    """Pixels of a side of the images a model takes."""
    side: Any = config.image_size
    return int(side if isinstance(side, int) else side[0])


def data_format(config: PreTrainedConfig) -> str:
    """The `data.format` of a classifier's inputs."""
    return "images" if config.model_type in VISION else "labelled"


def encoder(model: str, config: PreTrainedConfig, recipe: DataRecipe) -> Encode:
    """How the examples of a classifier, read by a recipe's `data`, become its inputs.

    Raises:
        ExitServeError: it has no tokenizer.
    """
    if config.model_type in VISION:
        channels = int(getattr(config, "num_channels", 3))
        task_inputs = ClassOfImage(*channel_statistics(model, channels))
        reader = ImageReader(recipe, image_side(config), channels)

        def images(examples: Examples) -> dict[str, Tensor]:
            batch = reader([{"image": name, "labels": 0} for name in examples.inputs])
            return task_inputs(None, batch).inputs

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
