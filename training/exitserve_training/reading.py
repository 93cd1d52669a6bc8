"""The data of a run, with the tokenizer or image processor they were made with."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from exitserve.errors import ExitServeError
from exitserve.windows import load_tokenizer
from exitserve_training.classification.inputs import image_processor
from exitserve_training.classification.labelled import (
    class_names,
    class_numbers,
    encode_texts,
    load_split_examples,
)
from exitserve_training.draws import Masking
from exitserve_training.folder import OWN_CHATS
from exitserve_training.models import known_classes
from exitserve_training.packing import pack_split, packed_by_run
from exitserve_training.parts import Task
from exitserve_training.recipe import Recipe
from exitserve_training.sources import load_split
from exitserve_training.streamed import ordered_texts, pack_in_order
from exitserve_training.tokenization import train_bpe
from exitserve_training.training_setup import TrainingSetup


def read_data(
    recipe: Recipe, setup: TrainingSetup, scratch: Path
) -> tuple[datasets.DatasetDict, Any]:
    """The data, ready to be batched, and the tokenizer or image processor they were made with."""
    if recipe.data.format == "images":
        return _read_examples(recipe, setup, image_processor(recipe.model, setup.config))
    if recipe.data.format == "chat":
        return _read_chats(recipe)
    path = recipe.tokenizer.path if recipe.tokenizer else recipe.model
    tokenizer = load_tokenizer(path) if path else None
    if recipe.data.format == "labelled":
        return _read_examples(recipe, setup, tokenizer)
    if tokenizer is not None and setup.task == "hidden token":
        Masking.of(tokenizer, recipe.mask_share, recipe.seed)  # before data are read
    if recipe.data.from_run is not None:
        if tokenizer is None:
            raise ExitServeError(
                "data.from_run needs a model with its tokenizer, or tokenizer.path."
            )
        length = recipe.data.sequence_length
        return packed_by_run(recipe.data.from_run, tokenizer, length), tokenizer
    return _packed(recipe, setup, tokenizer, scratch)


def _read_chats(recipe: Recipe) -> tuple[datasets.DatasetDict, PreTrainedTokenizerBase]:
    # Only here, because it loads TRL.
    from exitserve_training.chats import load_chats

    tokenizer = chat_tokenizer(recipe)
    own = None if recipe.data.own_chats is None else Path(recipe.output_dir) / OWN_CHATS
    return load_chats(recipe.data, tokenizer, recipe.seed, own), tokenizer


def chat_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The tokenizer for chats; raises `ExitServeError` where it has no chat template."""
    path = recipe.tokenizer.path if recipe.tokenizer else recipe.model
    if path is None:
        raise ExitServeError("data.format=chat needs tokenizer.path, or a model with its own.")
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(path)
    if tokenizer.chat_template is None:
        raise ExitServeError(
            "data.format=chat needs a tokenizer with a chat template, and this one has none; put "
            "a chat_template.jinja beside it, or set tokenizer.path to that of a chat model."
        )
    return tokenizer


def _packed(
    recipe: Recipe, setup: TrainingSetup, tokenizer: PreTrainedTokenizerBase | None, scratch: Path
) -> tuple[datasets.DatasetDict, PreTrainedTokenizerBase]:
    """Sequences of the recipe's documents, and the tokenizer, trained if there is none."""
    data = recipe.data
    split = None if data.order == "source" else load_split(data, recipe.seed)
    if tokenizer is None:
        texts = ordered_texts(data) if split is None else (doc.text for doc in split.train)
        tokenizer = _trained_tokenizer(recipe, texts, setup.task)
    if split is None:
        return pack_in_order(data, tokenizer, scratch), tokenizer
    length, blocks = data.sequence_length, data.validation_blocks
    return pack_split(split, tokenizer, length, blocks, data.document_end), tokenizer


def _trained_tokenizer(recipe: Recipe, texts: Iterable[str], task: Task) -> PreTrainedTokenizerBase:
    assert recipe.tokenizer is not None and recipe.tokenizer.train_bpe is not None
    size, length = recipe.tokenizer.train_bpe.vocab_size, recipe.data.sequence_length
    return train_bpe(texts, size, length, task=task)


def _read_examples(
    recipe: Recipe, setup: TrainingSetup, processor: Any
) -> tuple[datasets.DatasetDict, Any]:
    """Texts or images with their classes, and the tokenizer, trained if there is none."""
    train, held_out = load_split_examples(recipe.data, recipe.seed)
    names = class_names(train, known_classes(setup.config) if recipe.model else None)
    if processor is None:
        pairs: list[Any] = list(train.inputs)
        texts = [text for pair in pairs for text in pair if text is not None]
        processor = _trained_tokenizer(recipe, texts, setup.task)
    sides = datasets.DatasetDict()
    for name, side in {"train": train, "validation": held_out}.items():
        labels = class_numbers(side, names)
        if recipe.data.format == "images":
            rows = datasets.Dataset.from_dict({"image": side.inputs, "labels": labels})
        else:
            rows = encode_texts(side, labels, processor, recipe.data.sequence_length)
        # The names are part of the data, where resumed runs find them.
        sides[name] = rows.cast_column("labels", datasets.ClassLabel(names=names))
    return sides, processor
