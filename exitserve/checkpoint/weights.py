"""The tensors of a checkpoint's safetensors files: their headers, and copies of some of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from exitserve.checkpoint.first_layers import beyond
from exitserve.errors import ExitServeError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file."""

    name: str
    dtype: str
    """As safetensors names it: `BF16`, `F32`, `I8`, ..."""
    shape: tuple[int, ...]
    file: Path

    @property
    def num_elements(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Of all its numbers, whose width is in the name of the type (but for `BOOL`)."""
        bits = re.search(r"\d+", self.dtype)
        return self.num_elements * (8 if bits is None else int(bits[0])) // 8


@dataclass(frozen=True)
class StoredWeights:
    """The tensors of a checkpoint, and the metadata of its files."""

    tensors: tuple[StoredTensor, ...]
    metadata: Mapping[str, str]

    def first(self, num_layers: int) -> StoredWeights:
        """The tensors of the first layers, and those that belong to no layer."""
        kept = tuple(t for t in self.tensors if not beyond(t.name, num_layers))
        return StoredWeights(kept, self.metadata)


def weight_files(directory: Path) -> list[str]:
    """The safetensors files of a local checkpoint.

    Raises:
        ExitServeError: there are none, or their index is malformed.
    """
    whole = (directory / SINGLE).is_file()
    if not (directory / INDEX).is_file():
        if not whole:
            raise ExitServeError(_no_weights(directory))
        return [SINGLE]
    try:
        shards = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        if not all(Path(file).name == file for file in shards):
            raise ValueError("a file lies elsewhere")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExitServeError(
            f"'{directory / INDEX}' must map tensors to files beside it ({error})."
        ) from error
    if whole and not all((directory / file).is_file() for file in shards):
        return [SINGLE]  # the index is left over from shards that it replaced
    return sorted(set(shards))


def index_of(directory: Path) -> list[str]:
    """The name of a local checkpoint's index, where its weights are in the files that it names."""
    has_one = (directory / INDEX).is_file() and weight_files(directory) != [SINGLE]
    return [INDEX] if has_one else []


def check_weights(directory: Path) -> None:
    """Raises `ExitServeError` for safetensors files that are not whole or not all there, and for an
    index of shards that are gone, beside a whole file: vLLM goes by the index."""
    if any(directory.glob("*.safetensors")):
        read_weights(directory)
    if (directory / INDEX).is_file() and not index_of(directory):
        raise ExitServeError(
            f"'{directory / INDEX}' names files that are not there, and '{SINGLE}' is whole: "
            f"remove the index."
        )


def read_weights(directory: Path) -> StoredWeights:
    """Reads the headers of a local checkpoint's files.

    Raises:
        ExitServeError: there are no safetensors files, or one is missing or broken.
    """
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, str] = {}
    for name in weight_files(directory):
        found, about = _read_header(directory / name)
        tensors |= {tensor.name: tensor for tensor in found}
        metadata |= about
    return StoredWeights(tuple(tensors.values()), metadata)


def _no_weights(directory: Path) -> str:
    pickled = sorted(path.name for path in (*directory.glob("*.bin"), *directory.glob("*.pt")))
    if not pickled:
        return f"'{directory}' has neither {SINGLE} nor {INDEX}, so it holds no weights."
    return (
        f"the weights of '{directory}' are pickles ({pickled[0]}), which can run code when they "
        f"are read, so only safetensors are. If you trust them, convert them: "
        f"transformers' from_pretrained, then save_pretrained, writes {SINGLE}."
    )


def _read_header(path: Path) -> tuple[list[StoredTensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # no dict
            tensors = [
                StoredTensor(
                    name=name, dtype=part.get_dtype(), shape=tuple(part.get_shape()), file=path
                )
                for name, part in parts.items()
            ]
            return tensors, file.metadata() or {}
    except FileNotFoundError as error:
        raise ExitServeError(f"'{path}' is missing; download the checkpoint again.") from error
    except (OSError, SafetensorError) as error:
        raise ExitServeError(
            f"'{path}' is not a complete safetensors file ({error}); download the checkpoint again."
        ) from error


def write_weights(
    weights: StoredWeights, directory: Path, advance: Callable[[int], Any] = lambda _: None
) -> None:
    """Writes tensors as a checkpoint's weights, in files of the same names; bit for bit.

    One file is read at a time.

    Args:
        weights: what to copy.
        directory: an existing folder.
        advance: called with the bytes of each file that was copied.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    by_file: dict[Path, list[StoredTensor]] = {}
    for tensor in weights.tensors:
        by_file.setdefault(tensor.file, []).append(tensor)
    for path, tensors in by_file.items():
        with safe_open(path, "pt") as source:
            kept = {tensor.name: source.get_tensor(tensor.name) for tensor in tensors}
        name = SINGLE if len(by_file) == 1 else path.name
        save_file(kept, directory / name, {"format": "pt", **weights.metadata})
        advance(sum(tensor.num_bytes for tensor in tensors))
    if len(by_file) > 1:
        total = sum(tensor.num_bytes for tensor in weights.tensors)
        places = {tensor.name: tensor.file.name for tensor in weights.tensors}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
