"""Images with a class, decoded as they are needed: folders, arrays in a file, a `datasets` id.

An image goes by a name: a file's path, or `SOURCE#ROW` of a split or an .npz file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from exitserve.errors import ExitServeError
from exitserve_training.data_recipe import DataRecipe
from exitserve_training.sources import load_dataset

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


class ImageReader:
    """Makes batches of rows with `image`, a name, and `labels`."""

    def __init__(self, recipe: DataRecipe, side: int, channels: int) -> None:
        """Takes where images are, and the size to which they are brought."""
        self.side, self.channels = side, channels
        splits = (recipe.dataset_split, recipe.validation_split) if recipe.dataset else ()
        arrays = [name for name in (*recipe.files, *recipe.validation_files) if _is_table(name)]
        # Now, because processes that load batches begin with what is there.
        self._tables = {one: _table(recipe, one) for one in {*splits, *arrays} - {None}}

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Returns `pixels` (uint8 [B, channels, side, side]) and `labels` [B].

        Raises:
            ExitServeError: a file is not a readable image.
        """
        pixels = np.stack([self._pixels(row["image"]) for row in rows])
        labels = torch.tensor([row["labels"] for row in rows])
        return {"pixels": torch.from_numpy(pixels).permute(0, 3, 1, 2), "labels": labels}

    def _pixels(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """uint8 [side, side, channels]."""
        image = self._decoded(name).convert("RGB" if self.channels == 3 else "L")
        if image.size != (self.side, self.side):
            image = image.resize((self.side, self.side), Image.Resampling.BILINEAR)
        return np.asarray(image, dtype=np.uint8).reshape(self.side, self.side, self.channels)

    def _decoded(self, name: str) -> Any:
        source, _, row = name.rpartition("#")
        try:
            if not row.isdigit():
                return datasets.Image().decode_example({"path": name, "bytes": None})
            return self._tables[source][int(row)]["image"]
        except (UnidentifiedImageError, OSError) as error:
            raise ExitServeError(f"data file '{name}' is not a readable image.") from error


def check_image(name: str) -> None:
    """Raises `ExitServeError` for a file that does not begin like an image."""
    try:
        if Path(name).suffix.lower() in IMAGE_SUFFIXES:
            Image.open(name).close()
    except (UnidentifiedImageError, OSError) as error:
        raise ExitServeError(f"data file '{name}' is not a readable image.") from error


def named_images(
    recipe: DataRecipe, patterns: Sequence[str], split: str | None, needs_classes: bool
) -> tuple[list[str], list[str]]:
    """The names of images, and of their classes: "" where those are not needed nor known.

    Raises:
        ExitServeError: nothing is found.
    """
    names: list[str] = []
    classes: list[str] = []
    splits = [] if recipe.dataset is None or split is None else [split]
    for source in (*patterns, *splits):
        if source in splits or _is_table(source):
            table = _table(recipe, source)
            names += [f"{source}#{row}" for row in range(len(table))]
            classes += _classes(table, recipe, needs_classes)
        else:
            found = _in_folder(source, needs_classes)
            names += map(str, found)
            classes += [path.parent.name if path.parent != Path(source) else "" for path in found]
    return names, classes


def _is_table(name: str) -> bool:
    """Whether a file has many images."""
    return name.endswith(".npz")


def _table(recipe: DataRecipe, source: str) -> datasets.Dataset:
    """Columns `image` and `label`, the second where there is one; nothing is decoded yet."""
    if _is_table(source):
        return _arrays(source)
    table = load_dataset(recipe, source)
    kinds = table.features
    column = next((name for name in kinds if isinstance(kinds[name], datasets.Image)), None)
    if column is None:
        raise ExitServeError(f"'{recipe.dataset}' has no images; it has: {', '.join(kinds)}.")
    kept = {column: "image", recipe.label_field: "label"}
    table = table.select_columns([name for name in kept if name in kinds])
    return table.rename_columns({name: kept[name] for name in table.column_names})


def _arrays(source: str) -> datasets.Dataset:
    """An .npz file as CIFAR-10.2 has them: `images` [N, H, W, 3], `labels`, and `label_names`."""
    try:
        with np.load(source) as file:
            columns = {"image": list(file["images"]), "label": file["labels"]}
            kind = datasets.ClassLabel(names=[str(name) for name in file["label_names"]])
    except (KeyError, ValueError, OSError) as error:
        raise ExitServeError(
            f"data file '{source}' is no .npz file with images, labels and label_names."
        ) from error
    features = datasets.Features(image=datasets.Image(), label=kind)
    return datasets.Dataset.from_dict(columns, features=features)


def _classes(table: datasets.Dataset, recipe: DataRecipe, needs_classes: bool) -> list[str]:
    """The name of each row's class."""
    if "label" not in table.column_names:
        if not needs_classes:
            return [""] * len(table)
        raise ExitServeError(
            f"'{recipe.dataset}' has no column {recipe.label_field!r} of classes; set "
            f"data.label_field."
        )
    kind = table.features["label"]
    named = kind.int2str if isinstance(kind, datasets.ClassLabel) else str
    return [named(number) for number in table["label"]]


def _in_folder(name: str, needs_classes: bool) -> list[Path]:
    """The images in folders of their classes, or else in the folder itself."""
    folder = Path(name)
    if not folder.is_dir():
        raise ExitServeError(
            f"no folder '{name}'; images lie in one folder for each class, such as "
            f"'{name}/cat/1.jpg', in an .npz file, or are a data.dataset."
        )
    for pattern in ("*/*",) if needs_classes else ("*/*", "*"):
        found = sorted(p for p in folder.glob(pattern) if p.suffix.lower() in IMAGE_SUFFIXES)
        if found:
            return found
    raise ExitServeError(
        f"folder '{name}' has no images in folders of their classes ({', '.join(IMAGE_SUFFIXES)})."
    )
