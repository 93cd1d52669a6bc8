"""Inputs with a class: rows of a table with a text (or two), or images.

What training, classification and inspection read. GLUE's .tsv files are read as
they are: tab-separated, no quoting, with a header or with `columns`.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from exitserve.errors import ExitServeError, nearest
from exitserve_training.classification.images import named_images
from exitserve_training.data_recipe import DataRecipe
from exitserve_training.sources import load_dataset, matching_files, names_invalid, read_table

Text = tuple[str, str | None]
"""A text, and the second one where two are classified together."""


@dataclass(frozen=True)
class Examples:
    """Inputs and the name of each one's class."""

    inputs: list[Text] | list[str]
    """Texts, or the names of images."""
    classes: list[str]
    """As the data write them."""

    def __len__(self) -> int:
        return len(self.classes)

    def at(self, rows: Sequence[int]) -> Examples:
        """The examples of some rows."""
        inputs: Any = [self.inputs[row] for row in rows]
        return Examples(inputs, [self.classes[row] for row in rows])


def read_examples(
    recipe: DataRecipe,
    patterns: Sequence[str],
    split: str | None = None,
    *,
    needs_classes: bool = True,
) -> Examples:
    """Reads what `data.files` or `data.validation_files` name.

    Args:
        recipe: how to read.
        patterns: globs of tables, or folders and .npz files of images.
        split: the split of `data.dataset` to read too; None: nothing of it.
        needs_classes: if False, the column of classes may lack, and images may lie in the
            folder itself; their class is then "".

    Raises:
        ExitServeError: nothing is found, or an input cannot be read.
    """
    if recipe.format == "images":
        return Examples(*named_images(recipe, patterns, split, needs_classes))
    return _texts(recipe, patterns, split, needs_classes)


def load_split_examples(recipe: DataRecipe, seed: int) -> tuple[Examples, Examples]:
    """Shuffled examples to train on, and held-out ones; no example is in both.

    Raises:
        ExitServeError: as `read_examples`, or one side is empty.
    """
    known = read_examples(recipe, recipe.files, recipe.dataset_split)
    order = list(range(len(known)))
    random.Random(seed).shuffle(order)
    if recipe.validation_files or recipe.validation_split is not None:
        held_out = read_examples(recipe, recipe.validation_files, recipe.validation_split)
        seen = set(held_out.inputs)
        order = [row for row in order if known.inputs[row] not in seen]
    else:
        count = max(1, round(len(order) * recipe.validation_fraction))
        held_out, order = known.at(order[:count]), order[count:]
    if "validation_blocks" in recipe.model_fields_set:
        keep = np.linspace(0, len(held_out) - 1, min(recipe.validation_blocks, len(held_out)))
        held_out = held_out.at(keep.round().astype(int).tolist())
    train = known.at(order[: recipe.max_rows])
    if not len(train) or not len(held_out):
        raise ExitServeError(
            "too few rows to train on some and hold some out; give more data, or "
            "data.validation_files."
        )
    return train, held_out


def class_names(examples: Examples, known: Sequence[str] | None = None) -> list[str]:
    """All classes in order: that of the model if it knows them all, else sorted.

    Raises:
        ExitServeError: there is one class only.
    """
    found = set(examples.classes)
    if known is not None and found <= set(known):
        return list(known)
    if len(found) < 2:
        raise ExitServeError(
            f"all rows have the class {found.pop()!r}; a classifier needs at least two. Check "
            f"data.label_field."
        )
    # 10 after 9, where classes are numbers.
    return sorted(
        found, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name)
    )


def class_numbers(examples: Examples, names: Sequence[str]) -> list[int]:
    """Each example's class as its index among the names.

    Raises:
        ExitServeError: a class is not among them.
    """
    numbers = {name: number for number, name in enumerate(names)}
    unknown = sorted(set(examples.classes) - set(numbers))
    if unknown:
        raise ExitServeError(
            f"the data have the class {unknown[0]!r}, which is none of {', '.join(names[:20])}. "
            f"Check the label field."
        )
    return [numbers[name] for name in examples.classes]


def encode_texts(
    examples: Examples, labels: Sequence[int], tokenizer: PreTrainedTokenizerBase, length: int
) -> datasets.Dataset:
    """Columns `input_ids` (and what else the tokenizer gives) and `labels`, unpadded."""
    encoded = tokenized(examples, tokenizer, length, verbose=False)
    columns = {name: encoded[name] for name in encoded if name != "attention_mask"}
    return datasets.Dataset.from_dict({**columns, "labels": list(labels)})


def tokenized(examples: Examples, tokenizer: Any, length: int, **options: Any) -> Any:
    """What a tokenizer gives of texts, or of pairs of them, cut to `length` tokens."""
    texts: list[Any] = list(examples.inputs)
    first = [text for text, _ in texts]
    second = [text for _, text in texts] if texts and texts[0][1] is not None else None
    return tokenizer(first, second, truncation=True, max_length=length, **options)


def _texts(
    recipe: DataRecipe, patterns: Sequence[str], split: str | None, needs_classes: bool
) -> Examples:
    tables = [(str(path), _table(path, recipe)) for path in matching_files(patterns)]
    if recipe.dataset is not None and split is not None:
        tables.append((recipe.dataset, load_dataset(recipe, split)))
    texts: list[Text] = []
    classes: list[str] = []
    for name, table in tables:
        present = list(table.column_names)
        has_classes = needs_classes or recipe.label_field in present
        fields = {"text_field": recipe.text_field, "pair_field": recipe.pair_field}
        fields |= {"label_field": recipe.label_field} if has_classes else {}
        for key, field in fields.items():
            if field is not None and field not in present:
                raise ExitServeError(
                    f"'{name}' has no column {field!r}; it has: {', '.join(map(str, present))}. "
                    f"Set data.{key}, or data.columns if the file has no header."
                    f"{nearest(field, present)}"
                )
        seconds = [None] * len(table) if recipe.pair_field is None else table[recipe.pair_field]
        labels = table[recipe.label_field] if has_classes else [""] * len(table)
        rows = zip(table[recipe.text_field], seconds, labels, strict=True)
        for number, (text, second, label) in enumerate(rows, start=1):
            if text is None or label is None or (has_classes and str(label) in ("", "nan")):
                raise ExitServeError(f"'{name}', row {number}: its text or its class is missing.")
            texts.append((str(text), None if second is None else str(second)))
            # Scores, such as STS-B's from 0 to 5, become the nearest whole number.
            classes.append(str(round(label) if isinstance(label, float) else label))
    return Examples(texts, classes)


def _table(path: Path, recipe: DataRecipe) -> datasets.Dataset:
    if path.suffix not in (".tsv", ".csv"):
        return read_table(path)
    tabs = path.suffix == ".tsv"
    with names_invalid(path):
        return datasets.Dataset.from_csv(
            str(path),
            keep_in_memory=True,
            delimiter="\t" if tabs else ",",
            quoting=csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL,
            column_names=recipe.columns,
            # "None", "NA" and the like are texts, not gaps.
            keep_default_na=False,
        )
