"""Copies the tensors of the first layers from safetensors files to safetensors files.

A safetensors file is the length of its header (8 bytes, little endian), the header (JSON: name to
dtype, shape and offsets), and the tensors' bytes. Tensors
are copied as bytes, whatever their dtype and size, without loading any: one buffer is all memory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from exitserve.checkpoint.first_layers import beyond
from exitserve.errors import ExitServeError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
"""Most bytes of a file that is written; a larger tensor gets a file of its own."""

_METADATA = "__metadata__"
_MAX_HEADER_BYTES = 100_000_000
"""The format's limit."""
_BUFFER_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file."""

    name: str
    dtype: str
    """As safetensors names it: `BF16`, `F32`, `I8`, ..."""
    shape: tuple[int, ...]
    file: Path
    offset: int
    """Position of its first byte in the file."""
    num_bytes: int

    @property
    def num_elements(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)


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
    if not (directory / INDEX).is_file():
        if not (directory / SINGLE).is_file():
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
    return sorted(set(shards))


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
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size, _MAX_HEADER_BYTES):
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        metadata = header.pop(_METADATA, {})
        tensors = [
            StoredTensor(
                name=name,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                file=path,
                offset=8 + length + entry["data_offsets"][0],
                num_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in header.items()
        ]
        if any(t.num_bytes < 0 or t.offset + t.num_bytes > size for t in tensors):
            raise ValueError("it ends before its tensors do")
    except FileNotFoundError as error:
        raise ExitServeError(f"'{path}' is missing; download the checkpoint again.") from error
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExitServeError(
            f"'{path}' is not a complete safetensors file ({error}); download the checkpoint again."
        ) from error
    return tensors, metadata


def write_weights(
    weights: StoredWeights,
    directory: Path,
    advance: Callable[[int], Any] = lambda _: None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes tensors as a checkpoint's weights: one file, or shards with an index.

    Args:
        weights: what to copy.
        directory: an existing folder.
        advance: called with the bytes of each piece that was copied.
        max_shard_bytes: most bytes of a file.
    """
    shards = _shards(weights.tensors, max_shard_bytes)
    count = len(shards)
    shard_of: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        shard_of |= {tensor.name: name for tensor in shard}
        _write_file(directory / name, shard, weights.metadata, advance)
    if count > 1:
        total = sum(tensor.num_bytes for tensor in weights.tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(shard_of.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(tensors: Sequence[StoredTensor], most: int) -> list[list[StoredTensor]]:
    """Groups of tensors in their order, each of at most `most` bytes or a single tensor."""
    shards: list[list[StoredTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.num_bytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    return shards


def _write_file(
    path: Path,
    tensors: Sequence[StoredTensor],
    metadata: Mapping[str, str],
    advance: Callable[[int], Any],
) -> None:
    # Widest numbers first: readers map the file and need numbers aligned to their size.
    ordered = sorted(tensors, key=_number_bytes, reverse=True)
    header: dict[str, Any] = {_METADATA: {"format": "pt", **metadata}}
    end = 0
    for tensor in ordered:
        begin, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as target:
        target.write(struct.pack("<Q", len(text)) + text)
        for tensor in ordered:
            with tensor.file.open("rb") as source:
                source.seek(tensor.offset)
                _copy(source, target, tensor.num_bytes, advance)


def _number_bytes(tensor: StoredTensor) -> int:
    return tensor.num_bytes // max(1, tensor.num_elements)


def _copy(source: BinaryIO, target: BinaryIO, count: int, advance: Callable[[int], Any]) -> None:
    while count:
        piece = source.read(min(count, _BUFFER_BYTES))
        if not piece:
            raise OSError(f"'{source.name}' ended while it was copied")
        target.write(piece)
        advance(len(piece))
        count -= len(piece)
