"""Tensors are copied bit for bit, in whatever files they lie."""

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from exitserve.checkpoint.weights import INDEX, SINGLE, check_weights, read_weights, write_weights
from exitserve.errors import ExitServeError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool)
SHAPES = ((), (0,), (3,), (5, 7), (2, 3, 4))


def _checkpoint(layers: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every dtype and shape in every layer, odd sizes among them, and outside the layers."""
    generator = torch.Generator().manual_seed(seed)
    places = ["model.norm", *(f"model.layers.{layer}.mlp" for layer in range(layers))]
    return {
        f"{place}.{kind}{shape_at}": (torch.randn(shape, generator=generator) * 9).to(dtype)
        for place in places
        for kind, dtype in enumerate(DTYPES)
        for shape_at, shape in enumerate(SHAPES)
    }


def _load_all(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert file.metadata()["format"] == "pt", "transformers asks for it"
        tensors = load_file(path)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


@given(st.integers(1, 4), st.integers(1, 9))
def test_the_first_layers_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, depth: int, files: int
) -> None:
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    tensors = _checkpoint()
    names = list(tensors)
    shards = [names[at::files] for at in range(files)]
    weight_map = {}
    for at, part in enumerate(shards):
        file = f"model-{at}.safetensors"
        save_file({name: tensors[name] for name in part}, source / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (source / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    copied: list[int] = []
    kept = read_weights(source).first(depth)
    write_weights(kept, target, copied.append)
    found = _load_all(target)
    assert set(found) == {
        name
        for name in names
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < depth
    }
    for name, tensor in found.items():
        assert tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name]), name
    assert sum(copied) == sum(tensor.nbytes for tensor in found.values())
    written = sorted(path.name for path in target.glob("*.safetensors"))
    if len(written) == 1:
        assert written == [SINGLE] and not (target / INDEX).exists()
        return
    index = json.loads((target / INDEX).read_text())
    assert set(index["weight_map"]) == set(found)
    assert sorted(set(index["weight_map"].values())) == written
    assert index["metadata"]["total_size"] == sum(copied)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(_checkpoint(), tmp_path / SINGLE)
    return tmp_path / SINGLE


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:-1],
        lambda data: data[:4],
        lambda data: b"",
        lambda data: struct.pack("<Q", 1 << 60) + data[8:],
        lambda data: struct.pack("<Q", 4) + b"[{}]" + data,
        lambda data: b"version https://git-lfs.github.com/spec/v1\n",
    ],
    ids=["cut short", "no header", "empty", "endless header", "a list", "a pointer"],
)
def test_a_broken_file_is_named(single: Path, spoil) -> None:
    single.write_bytes(spoil(single.read_bytes()))
    with pytest.raises(
        ExitServeError, match=r"model\.safetensors' is not a complete safetensors file"
    ):
        read_weights(single.parent)
    with pytest.raises(ExitServeError, match="not a complete"):  # before an engine starts
        check_weights(single.parent)


def test_a_missing_shard_is_named_unless_a_whole_file_replaced_it(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(ExitServeError, match=r"model-1\.safetensors' is missing"):
        read_weights(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / SINGLE)
    assert [one.file.name for one in read_weights(tmp_path).tensors] == [SINGLE]
    with pytest.raises(ExitServeError, match="remove the index"):  # which vLLM goes by
        check_weights(tmp_path)


@pytest.mark.parametrize(
    "index", ["[]", "{", '{"weight_map": {"a": "../model.safetensors"}}', '{"weight_map": [1]}']
)
def test_a_bad_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ExitServeError, match="must map tensors to files beside it"):
        read_weights(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ExitServeError, match="holds no weights"):
        read_weights(tmp_path)
