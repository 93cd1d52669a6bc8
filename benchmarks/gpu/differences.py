"""What training changed, in few and small files, so that base + changes is the model again.

Each row of a change is rounded to steps of its own, a share of the row's root mean square:

    d = trained - base,  s = max(step rms(d), max|d| / 127) in float16,  v = round(d / s) in int8

so the error is at most s / 2. A blob is the length of a head in JSON (8 bytes), the head, all s,
and all v, tensor by tensor, in parts that LZMA compresses; it is cut into files delta.0, delta.1
and so on. The head also has the trained checkpoint's exits, and the files of its exit rows.
"""

from __future__ import annotations

import base64
import io
import json
import lzma
import os
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from stages import StageError
from torch import Tensor

from exitserve.checkpoint.block import BLOCK
from exitserve.checkpoint.calibration import ROWS_FOLDER

STEP, COARSER, COARSEST = 0.4, 1.15, 4.0
"""Steps of a row, in its root mean square: the first, times what if the files are too large, and at
most. The first takes about 3.5 bits a weight."""
MOST_BYTES, FILE_BYTES = 60_000_000, 16_000_000
"""Of all files, and of each."""
PARTS = 64
_FORMAT: dict[str, Any] = {"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 0, "pb": 0}
# Noise has no matches to look for: a twelfth of the time, and a little smaller.
_FAST = _FORMAT | {"mf": lzma.MF_BT2, "nice_len": 8, "depth": 1, "dict_size": 4096}
_SMALLEST = 2.0**-24
"""The smallest step that float16 has."""

Weights = Mapping[str, Tensor]


def leave(base: Path, trained: Path, out: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Writes the changes between two checkpoints, as coarse as they must be.

    Args:
        base: its directory.
        trained: that of the other.
        out: for the files.
        most_bytes: of all files together.

    Returns:
        `step` and `bytes`.

    Raises:
        StageError: the tensors are others, or the files would be too large at any step.
    """
    old, new = weights_of(base), weights_of(trained)
    shapes = {name: tuple(tensor.shape) for name, tensor in old.items()}
    if shapes != {name: tuple(tensor.shape) for name, tensor in new.items()}:
        raise StageError(
            f"'{trained}' has other tensors than '{base}', so they have no difference."
        )
    step, exits = STEP, _exits(trained)
    while len(blob := packed(old, new, step, exits)) > most_bytes:
        step *= COARSER
        if step > COARSEST:
            raise StageError(f"the changes take more than {most_bytes / 1e6:.0f} MB at any step.")
    return {"step": round(step, 4), "bytes": cut(blob, out, "delta")}


def cut(blob: bytes, out: Path, name: str) -> int:
    """Writes files `name.0`, `name.1`, ... of at most `FILE_BYTES`; returns the bytes of all."""
    for number, start in enumerate(range(0, len(blob), FILE_BYTES)):
        (out / f"{name}.{number}").write_bytes(blob[start : start + FILE_BYTES])
    return len(blob)


def take_up(base: Path, files: Path, out: Path) -> None:
    """Writes the checkpoint base + changes.

    Args:
        base: its directory.
        files: the directory with `delta.0`, ...
        out: a directory that does not exist yet.

    Raises:
        StageError: there are no such files, or they belong to another base.
    """
    from safetensors.torch import save_file

    blob = b"".join(path.read_bytes() for path in parts_of(files, "delta"))
    changed, head = unpacked(weights_of(base), blob)
    ours = shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json")
    shutil.copytree(base, out, ignore=ours)
    save_file(changed, out / "model.safetensors", metadata={"format": "pt"})
    config = {key: value for key, value in _config(base).items() if key != BLOCK}
    config |= {} if head.get(BLOCK) is None else {BLOCK: head[BLOCK]}
    for name, data in head.get(ROWS_FOLDER, {}).items():
        (out / ROWS_FOLDER).mkdir(exist_ok=True)
        (out / ROWS_FOLDER / name).write_bytes(base64.b64decode(data))
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _exits(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint has beside weights: the block in its config, and the files it names."""
    files = (checkpoint / ROWS_FOLDER).glob("*.safetensors")
    rows = {path.name: base64.b64encode(path.read_bytes()).decode() for path in files}
    return {BLOCK: _config(checkpoint).get(BLOCK), ROWS_FOLDER: rows}


def _config(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return found


def parts_of(folder: Path, name: str) -> list[Path]:
    """The files `name.0`, `name.1`, ... of a folder, in their order."""
    found = [path for path in folder.glob(f"{name}.*") if path.suffix[1:].isdigit()]
    if not found:
        raise StageError(f"'{folder}' has no files {name}.0, {name}.1, ...")
    return sorted(found, key=lambda path: int(path.suffix[1:]))


def weights_of(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint's files, in the order of their names."""
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for path in checkpoint.glob("*.safetensors"):
        found |= load_file(path)
    if not found:
        raise StageError(f"'{checkpoint}' has no weights (*.safetensors).")
    return dict(sorted(found.items()))


def packed(old: Weights, new: Weights, step: float, exits: Mapping[str, Any]) -> bytes:
    """The blob of the changes from `old` to `new`, in steps of `step` root mean squares of a row;
    with `exits` in its head."""
    rows = [
        rounded(_rows(new[name].float() - tensor.float()), step) for name, tensor in old.items()
    ]
    scales = b"".join(own.numpy().tobytes() for own, _ in rows)
    values = b"".join(own.numpy().tobytes() for _, own in rows)
    chunk = max(1, -(-len(values) // PARTS))
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # LZMA lets the others run
        parts = list(threads.map(_compressed, _cut(values, chunk)))
    head = {
        "tensors": [(name, list(tensor.shape)) for name, tensor in old.items()],
        "chunk": chunk,
        "parts": [len(part) for part in parts],
        "scales": len(scales),
        **exits,
    }
    text = json.dumps(head).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, scales, *parts])


def unpacked(old: Weights, blob: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """`old` + the changes of a blob, in the types of `old`, and the blob's head.

    Raises:
        StageError: the tensors are others.
    """
    size = int.from_bytes(blob[:8], "little")
    head, at = json.loads(blob[8 : 8 + size]), 8 + size
    if head["tensors"] != [[name, list(tensor.shape)] for name, tensor in old.items()]:
        raise StageError("these changes belong to another base: its tensors are others.")
    scales = torch.frombuffer(bytearray(blob[at : at + head["scales"]]), dtype=torch.float16)
    parts, at = [], at + head["scales"]
    for length in head["parts"]:
        parts.append(blob[at : at + length])
        at += length
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        values = bytearray(b"".join(threads.map(_whole, parts)))
    steps, row, value = torch.frombuffer(values, dtype=torch.int8), 0, 0
    changed = {}
    for name, tensor in old.items():
        rows = len(_rows(tensor))
        own = steps[value : value + tensor.numel()].reshape(rows, -1).float()
        change = own * scales[row : row + rows, None].float()
        changed[name] = (tensor.float() + change.reshape(tensor.shape)).to(tensor.dtype)
        value, row = value + tensor.numel(), row + rows
    return changed, head


def rounded(change: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """Steps [R] float16 and values [R, C] int8 of a change [R, C]."""
    wanted = torch.maximum(change.pow(2).mean(dim=1).sqrt() * step, change.abs().amax(dim=1) / 127)
    scales = wanted.clamp(min=_SMALLEST).half()
    values = (change / scales.float()[:, None]).round().clamp(-127, 127)
    return scales, values.to(torch.int8)


def _rows(tensor: Tensor) -> Tensor:
    """A matrix as it is, all else as one row."""
    return tensor if tensor.ndim == 2 else tensor.reshape(1, -1)


def _cut(values: bytes, chunk: int) -> Iterator[bytes]:
    return (values[start : start + chunk] for start in range(0, len(values), chunk))


def _compressed(values: bytes) -> bytes:
    return lzma.compress(values, format=lzma.FORMAT_RAW, filters=[_FAST])


def _whole(part: bytes) -> bytes:
    return lzma.decompress(part, format=lzma.FORMAT_RAW, filters=[_FORMAT])


def packed_adapter(adapter: Path, room: Path) -> bytes:
    """A tar file of an adapter, its weights in bfloat16; `room` is a folder that does not exist."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(adapter, room)
    file = room / "adapter_model.safetensors"
    small = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(small, file, metadata={"format": "pt"})
    whole = room.with_suffix(".tar")
    with tarfile.open(whole, "w") as packed:
        packed.add(room, arcname=".")
    return whole.read_bytes()


def unpack_adapter(earlier: Path, adapter: Path) -> None:
    """Unpacks the adapter that a call left in files."""
    whole = b"".join(part.read_bytes() for part in parts_of(earlier, "adapter"))
    with tarfile.open(fileobj=io.BytesIO(whole)) as packed:
        packed.extractall(adapter, filter="data")
