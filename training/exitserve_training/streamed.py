"""Documents in their source's order, read and packed piece by piece: memory does not grow.

`data.order: source` reads each document once, tokenises a megabyte at a time, and writes sequences
to an Arrow file, which training maps into memory. Nothing is shuffled, and equal documents are
kept: perplexity on such text is that of the text as it was published.

The file is moved to its place, never read whole: what is read through a map counts as memory of the
process until the kernel wants it back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import datasets
import numpy as np
from datasets.arrow_writer import ArrowWriter
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from exitserve.errors import ExitServeError
from exitserve_training.data_recipe import DataRecipe
from exitserve_training.packing import TRAIN_FILE, check_sides, sequences, spread_over
from exitserve_training.sources import (
    TABLES,
    Document,
    load_dataset,
    matching_files,
    python_documents,
    table_documents,
)

PIECE = 64 * 1024
"""Characters of a text file that are read at once: a batch of the tokenizer's is 16 of them, each
of which one core works on."""

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

    `train` is the beginning of `scratch`'s `TRAIN_FILE`, for `keep_in_order`. What is held out is
    `validation_split` or `validation_files`, or else the last sequences.

    Raises:
        ExitServeError: a source cannot be read, or a side has less text than one sequence.
    """
    train = _packed(ordered_documents(recipe), recipe, tokenizer, scratch / TRAIN_FILE)
    if recipe.validation_files or recipe.validation_split is not None:
        documents = _held_out(recipe)
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
    for document in _within_packages(_sources(recipe), recipe.max_package_bytes):
        used += len(document.text.encode())
        if recipe.max_bytes is not None and used > recipe.max_bytes:
            return
        yield document


def _sources(recipe: DataRecipe) -> Iterator[Document]:
    limit = recipe.max_file_bytes
    yield from _files(recipe.files, recipe.text_field, limit)
    documents: list[Iterator[Document]] = []
    if recipe.dataset is not None:
        documents.append(_of_dataset(recipe, recipe.dataset_split))
    documents += [python_documents(place, recipe.exclude) for place in recipe.python_source]
    for source in documents:
        for document in source:
            if limit is None or len(document.text.encode()) <= limit:
                yield document


def _held_out(recipe: DataRecipe) -> Iterator[Document]:
    yield from _files(recipe.validation_files, recipe.text_field, None)
    if recipe.validation_split is not None:
        yield from _of_dataset(recipe, recipe.validation_split)


def _of_dataset(recipe: DataRecipe, split: str) -> Iterator[Document]:
    rows = load_dataset(recipe, split, streaming=True)
    return table_documents(rows, str(recipe.dataset), recipe.text_field)


def _files(patterns: Sequence[str], text_field: str, limit: int | None) -> Iterator[Document]:
    for path in matching_files(patterns):
        if path.suffix in TABLES:
            yield from _table(path, text_field, limit)
        elif limit is None or path.stat().st_size <= limit:
            yield from _text_pieces(path)


def _table(path: Path, text_field: str, limit: int | None) -> Iterator[Document]:
    kind = "parquet" if path.suffix == ".parquet" else "json"
    try:
        rows = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
        for document in table_documents(rows, str(path), text_field):
            if limit is None or len(document.text.encode()) <= limit:
                yield document
    except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:
        raise ExitServeError(f"data file '{path}' is not valid {path.suffix[1:]}.") from error


def _text_pieces(path: Path) -> Iterator[Document]:
    """A text file as parts of about `PIECE` characters; only the last of them ends it."""
    left = ""
    try:
        with path.open(encoding="utf-8") as file:
            while more := file.read(PIECE):
                left += more
                cut = _cut_at(left)
                yield Document(str(path), left[:cut], is_continued=True)
                left = left[cut:]
    except UnicodeDecodeError as error:
        raise ExitServeError(f"data file '{path}' is not UTF-8 text: {error}.") from error
    yield Document(str(path), left)


def _cut_at(text: str) -> int:
    """Where a text can be cut so that its parts have the tokens of the whole.

    Byte-level BPEs split text into words first, and no word goes over the end of a line that
    another follows at once. Without such a place the cut is before the last space, or at the end.
    """
    at = text.rfind("\n", 0, len(text) - 1)
    while at >= 0 and text[at + 1].isspace():
        at = text.rfind("\n", 0, at)
    if at >= 0:
        return at + 1
    space = text.rfind(" ")
    return space if space > 0 else len(text)


def _within_packages(documents: Iterator[Document], limit: int | None) -> Iterator[Document]:
    """Leaves out what goes over so many bytes of one package of `python_source`."""
    used: Counter[str] = Counter()
    for document in documents:
        if limit is not None:
            used[document.package] += len(document.text.encode())
            if used[document.package] > limit:
                continue
        yield document


def _packed(
    documents: Iterator[Document],
    recipe: DataRecipe,
    tokenizer: PreTrainedTokenizerBase,
    file: Path,
) -> datasets.Dataset:
    """The sequences of documents, written to a file as they come."""
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
    # disable=None: no bar where the output is not a terminal.
    shown = tqdm(documents, desc="tokenising", unit=" documents", disable=None)
    with ArrowWriter(path=str(file), features=features) as writer:
        for blocks in sequences(shown, tokenizer, recipe.sequence_length, recipe.document_end):
            table: list[np.ndarray] = list(blocks)
            writer.write_batch({"input_ids": table})
        writer.finalize()
    return datasets.Dataset.from_file(str(file))
