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
from PIL import Image
from torch import Tensor

from exitserve.errors import ExitServeError
from exitserve.reporting.progress import counted
from exitserve_training.data_recipe import DataRecipe
from exitserve_training.sources import load_dataset, names_invalid

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


class ImageReader:
    """Makes batches of rows with `image`, a name, and `labels`."""

    def __init__(self, recipe: DataRecipe, processor: Any) -> None:
        """Takes where images are, and the processor that gives them size and scale."""
        self.processor = processor
        # Opened now, because processes that load batches begin with what is there.
        files, splits = recipe.files + recipe.validation_files, recipe.validation_split
        self._tables = _tables(recipe, files, recipe.dataset_split, splits)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Returns `pixels` [B, C, H, W], normalised, and `labels` [B].

        Raises:
            ExitServeError: a file is not a readable image.
        """
        images = [self._image(row["image"]) for row in rows]
        pixels = self.processor(images, return_tensors="pt")["pixel_values"]
        return {"pixels": pixels, "labels": torch.tensor([row["labels"] for row in rows])}

    def _image(self, name: str) -> Image.Image:
        source, _, row = name.rpartition("#")
        with names_invalid(Path(name)):
            table = self._tables.get(source)
            image: Image.Image = Image.open(name) if table is None else table[int(row)]["image"]
            return image.convert("RGB" if len(self.processor.image_mean) == 3 else "L")


def named_images(
    recipe: DataRecipe, patterns: Sequence[str], split: str | None, needs_classes: bool
) -> tuple[list[str], list[str]]:
    """The names of images, and of their classes: "" where those are not needed nor known.

    Raises:
        ExitServeError: nothing is found, or a file does not begin like an image.
    """
    names: list[str] = []
    classes: list[str] = []
    tables = _tables(recipe, patterns, split)
    for source, table in tables.items():
        kind = table.features.get("label")
        if kind is None and needs_classes:
            raise ExitServeError(
                f"'{recipe.dataset}' has no column {recipe.label_field!r} of classes; set "
                f"data.label_field."
            )
        names += [f"{source}#{row}" for row in range(len(table))]
        named = getattr(kind, "int2str", str)
        classes += [""] * len(table) if kind is None else map(named, table["label"])
    for pattern in patterns:
        if pattern not in tables:
            found = _in_folder(Path(pattern), needs_classes)
            names += map(str, found)
            classes += ["" if one.parent == Path(pattern) else one.parent.name for one in found]
    return names, classes


def _tables(
    recipe: DataRecipe, patterns: Sequence[str], *splits: str | None
) -> dict[str, datasets.Dataset]:
    """By source, columns `image` and `label`, the second where there is one; not yet decoded."""
    found = {name: _arrays(Path(name)) for name in patterns if name.endswith(".npz")}
    for split in splits if recipe.dataset is not None else ():
        if split is not None:
            table = load_dataset(recipe, split)
            kinds = table.features
            images = [name for name in kinds if isinstance(kinds[name], datasets.Image)]
            if not images:
                raise ExitServeError(f"'{recipe.dataset}' has no images, only {', '.join(kinds)}.")
            kept = {images[0]: "image", recipe.label_field: "label"}
            table = table.select_columns([name for name in kept if name in kinds])
            found[split] = table.rename_columns({name: kept[name] for name in table.column_names})
    return found


def _arrays(file: Path) -> datasets.Dataset:
    """Of an .npz file, as CIFAR-10.2 is: `images` [N, H, W, 3], `labels`, `label_names`."""
    with names_invalid(file), np.load(file) as arrays:
        kind = datasets.ClassLabel(names=arrays["label_names"].tolist())
        features = datasets.Features(image=datasets.Image(), label=kind)
        columns = {"image": list(arrays["images"]), "label": arrays["labels"]}
        return datasets.Dataset.from_dict(columns, features=features)


def _in_folder(folder: Path, needs_classes: bool) -> list[Path]:
    """The images in folders of their classes, or else in the folder itself."""
    for pattern in ("*/*",) if needs_classes else ("*/*", "*"):
        found = sorted(p for p in folder.glob(pattern) if p.suffix.lower() in IMAGE_SUFFIXES)
        for path in counted(found, "checking images"):
            with names_invalid(path):
                Image.open(path).close()
        if found:
            return found
    lacks = "has no images in folders of their classes" if folder.is_dir() else "does not exist"
    raise ExitServeError(
        f"folder '{folder}' {lacks}; images ({', '.join(IMAGE_SUFFIXES)}) are '{folder}/cat/1.jpg'."
    )
