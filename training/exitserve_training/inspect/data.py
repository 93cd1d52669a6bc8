"""The data of an inspection: batches of the user's files, for any kind of model.

Language models read text cut into sequences, masked ones with some tokens masked; classifiers
read labelled rows or images. Shapes: B rows, T tokens.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig

from exitserve.errors import ExitServeError
from exitserve.windows import load_tokenizer
from exitserve_training.classification.inputs import batch_rows, data_format, encoder
from exitserve_training.classification.labelled import class_numbers, read_examples
from exitserve_training.data_recipe import data_from
from exitserve_training.draws import Masking
from exitserve_training.models import check_fits, known_classes, model_config
from exitserve_training.packing import pack
from exitserve_training.parts import Task, task_of
from exitserve_training.sources import Document, read_documents
from exitserve_training.tasks import MaskedToken, TaskBatch, TaskInputs, next_token

MASKED_SHARE = 0.15
"""Of the tokens of a masked model's text, as in its training (BERT's share)."""


@dataclass(frozen=True)
class InspectionSettings:
    """The options of the command line."""

    model: str
    """Directory or hub id."""
    data: Sequence[str]
    """Files, globs, or folders of images."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """`text_field` and the like, as in a recipe's `data`."""
    rows: int = 200
    """At most so many sequences, texts or images, drawn by the seed."""
    samples: int = 4000
    length: int | None = None
    """Tokens of a sequence of text; None for 256, or the model's context if shorter."""
    batch_size: int = 8
    seed: int = 0
    prompts: int = 0
    prompt_tokens: int = 32
    new_tokens: int = 64
    sentence_model: str | None = None
    dtype: str = "float32"


@dataclass(frozen=True)
class InspectionData:
    """The batches of one inspection."""

    task: Task
    batches: DataLoader[TaskBatch]
    """Made as they are read."""
    tokenizer: Any
    """None for images."""
    documents: list[Document]
    """The texts of a language model; empty for classifiers."""


def load_inspection_data(settings: InspectionSettings) -> InspectionData:
    """Reads the data for a checkpoint, whose config says what kind it is.

    Raises:
        ExitServeError: the model or the data cannot be read, or do not go together.
    """
    config = model_config(settings.model)
    task = task_of((config.architectures or ["?"])[0])
    if task == "class":
        return _classifier_data(settings, config)
    tokenizer = load_tokenizer(settings.model)
    context = int(config.max_position_embeddings)
    length = min(256, context) if settings.length is None else settings.length
    check_fits(config, tokenizer, length)
    recipe = data_from({"files": list(settings.data), **settings.fields, "sequence_length": length})
    documents = list(read_documents(recipe))
    packed = pack(documents, tokenizer, length)
    if not len(packed):
        raise ExitServeError(
            f"the data have fewer than {length} tokens; give more, or a lower --sequence-length."
        )
    ids = torch.tensor(packed.select(_drawn(len(packed), settings))["input_ids"])
    task_inputs: TaskInputs = next_token
    if task == "hidden token":
        task_inputs = MaskedToken(Masking.of(tokenizer, MASKED_SHARE, settings.seed))

    def batch(part: Any) -> TaskBatch:
        return task_inputs(None, {"input_ids": part})

    parts: Any = torch.split(ids, settings.batch_size)
    batches = DataLoader(parts, batch_size=None, collate_fn=batch)
    return InspectionData(task, batches, tokenizer, documents)


def _drawn(count: int, settings: InspectionSettings) -> list[int]:
    """The rows to look at, of so many."""
    order = list(range(count))
    random.Random(settings.seed).shuffle(order)
    return order[: settings.rows]


def _classifier_data(settings: InspectionSettings, config: PreTrainedConfig) -> InspectionData:
    recipe = data_from(
        {"format": data_format(config), "files": list(settings.data), **settings.fields}
    )
    examples = read_examples(recipe, recipe.files, recipe.dataset_split)
    examples = examples.at(_drawn(len(examples), settings))
    names, encode = known_classes(config), encoder(settings.model, config, recipe)
    labels = torch.tensor(class_numbers(examples, names))[:, None]

    def batch(part: list[int]) -> TaskBatch:
        known = labels[part]
        return TaskBatch(encode(examples.at(part)), known, torch.ones_like(known, dtype=torch.bool))

    order: Any = batch_rows(examples, settings.batch_size)
    return InspectionData("class", DataLoader(order, batch_size=None, collate_fn=batch), None, [])


def prompts(data: InspectionData, count: int, tokens: int) -> Iterator[list[int]]:
    """Prompts for generation: at most `count`, each `tokens` long, spread over the texts.

    Of each text its beginning; where there are fewer texts than prompts (a novel is one text),
    beginnings of lines further on as well.
    """
    share = -(-count // max(1, len(data.documents)))
    given = 0
    for document in data.documents:
        for part in range(share):
            start = _line_after(document.text, part * len(document.text) // share)
            text = document.text[start : start + tokens * 20]
            ids = data.tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) >= tokens and given < count:
                given += 1
                yield list(ids[:tokens])


def _line_after(text: str, place: int) -> int:
    """Where the first line begins at or after a place of a text, or the place if none does."""
    return 0 if place == 0 else text.find("\n", place) + 1 or place
