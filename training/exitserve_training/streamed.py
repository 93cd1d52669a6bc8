"""Documents in their source's order, read and packed piece by piece: memory does not grow.

`data.order: source` reads each document once, tokenises a megabyte at a time, and writes sequences
to an Arrow file, which training maps into memory. Nothing is shuffled, and equal documents are
kept: perplexity on such text is that of the text as it was published.

The file is moved to its place, never read whole: what is read through a map counts as memory of the
process until the kernel wants it back.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
from datasets.arrow_writer import ArrowWriter
from transformers import PreTrainedTokenizerBase

from exitserve.reporting.progress import counted
from exitserve_training.data_recipe import DataRecipe
from exitserve_training.packing import TRAIN_FILE, check_sides, sequences, spread_over
from exitserve_training.sources import Document, read_documents, read_held_out, within

TOKENIZER_CHARACTERS = 100_000_000
"""A tokenizer is trained on the first so many, in which it counts words."""


def ordered_texts(recipe: DataRecipe) -> Iterator[str]:
    """Texts to train a tokenizer on: the beginning of what the run trains on."""
    used = 0
    for document in ordered_documents(recipe):
        used += len(document.text)
        yield document.text
        if used >= TOKENIZER_CHARACTERS:
            return


def pack_in_order(
    recipe: DataRecipe, tokenizer: PreTrainedTokenizerBase, scratch: Path
) -> datasets.DatasetDict:
    """Packs both sides as `packing.pack_split` does, by way of files in `scratch`.

    `train` is the beginning of `scratch`'s `TRAIN_FILE`, for `save_packed`. What is held out is
    `validation_split` or `validation_files`, or else the last sequences.

    Raises:
        ExitServeError: a source cannot be read, or a side has less text than one sequence.
    """
    train = _packed(ordered_documents(recipe), recipe, tokenizer, scratch / TRAIN_FILE)
    if recipe.validation_files or recipe.validation_split is not None:
        documents = read_held_out(recipe, in_pieces=True)
        held_out = _packed(documents, recipe, tokenizer, scratch / "validation.arrow")
    else:
        count = max(1, round(len(train) * recipe.validation_fraction))
        held_out = train.select(range(max(len(train) - count, 0), len(train)))
        train = train.select(range(max(len(train) - count, 0)))
    sides = datasets.DatasetDict(train=train, validation=held_out)
    check_sides(sides, recipe.sequence_length)
    sides["validation"] = spread_over(held_out, recipe.validation_blocks)
    return sides


def ordered_documents(recipe: DataRecipe) -> Iterator[Document]:
    """The documents to train on, one after the other, until `max_bytes` of text.

    Raises:
        ExitServeError: a file is missing, empty or not readable, or a column is missing.
    """
    used = 0
    documents = read_documents(recipe, in_pieces=True)
    for document in within(documents, recipe.max_package_bytes, lambda doc: doc.package):
        used += len(document.text.encode())
        if recipe.max_bytes is not None and used > recipe.max_bytes:
            return
        yield document


def _packed(
    documents: Iterator[Document],
    recipe: DataRecipe,
    tokenizer: PreTrainedTokenizerBase,
    file: Path,
) -> datasets.Dataset:
    """The sequences of documents, written to a file as they come."""
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
    shown = counted(documents, "tokenising")
    with ArrowWriter(path=str(file), features=features) as writer:
        for blocks in sequences(shown, tokenizer, recipe.sequence_length, recipe.document_end):
            table: list[np.ndarray] = list(blocks)
            writer.write_batch({"input_ids": table})
        writer.finalize()
    return datasets.Dataset.from_file(str(file))
