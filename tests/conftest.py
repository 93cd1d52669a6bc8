"""Checkpoints that tests share: tiny random ones, and the bundled model."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from .forks import fork_instead_of_spawn
from .scheduling import (
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_xdist_make_scheduler,
)

__all__ = [
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_xdist_make_scheduler",
]

# Deadlines measure the machine, not the code.
settings.register_profile(
    "exitserve", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("exitserve")

# Nothing here may wait for a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

# Workers of pytest-xdist compute on a core each. By vLLM's default all engines would take the same.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    cores = sorted(os.sched_getaffinity(0))
    own = cores[int(worker.removeprefix("gw")) % len(cores)]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(own))
    os.environ.setdefault("OMP_NUM_THREADS", "1")

fork_instead_of_spawn()

ROOT = Path(__file__).parent.parent
BUNDLED = ROOT / "models" / "exit-py-19m"
BUNDLED_EXITS = [6, 12, 18]
"""Of its 24 layers, those that were trained to be exits."""
TINY_EXITS = (2, 4)
VOCAB = 128
EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": EIGHT_BITS | {"strategy": "channel", "dynamic": False},
            "input_activations": EIGHT_BITS | {"strategy": "token", "dynamic": True},
        }
    },
}

MakeCheckpoint = Callable[..., Path]


def _tokenizer() -> Any:
    """One token per ASCII character; id 0 starts a text, id 1 ends it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "</s>": 1} | {chr(code): code for code in range(2, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Makes random checkpoints: `make_checkpoint("llama", sliding_window=32)`.

    Weights are larger than usual, so that confidences of an untrained model spread out and exits
    fire at thresholds between 0.05 and 0.5. Checks read the rows of every second token.
    """
    made: dict[str, Path] = {}

    def make(family: str = "llama", *, exits: tuple[int, ...] = TINY_EXITS, **changes: Any) -> Path:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from exitserve.checkpoint.block import MultiExit, write_multi_exit
        from exitserve.checkpoint.exit_rows import save_exit_rows

        key = f"{family}-{exits}-{sorted(changes.items())}"
        if key in made:
            return made[key]
        shape: dict[str, Any] = {
            "vocab_size": VOCAB,
            "max_position_embeddings": 256,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 1,
            "initializer_range": 0.12,
            "tie_word_embeddings": True,
        }
        if family == "gpt2":
            shape |= {"n_embd": 128, "n_layer": 6, "n_head": 4, "n_positions": 256}
            del shape["max_position_embeddings"]
        else:
            shape |= {
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_hidden_layers": 6,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
            }
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **(shape | changes))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # Fresh gains are all one and fresh biases zero, which would hide a forgotten one.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
        directory = tmp_path_factory.mktemp(family)
        model.save_pretrained(directory)
        _tokenizer().save_pretrained(directory)
        name = save_exit_rows(directory, list(range(1, VOCAB, 2)))
        write_multi_exit(directory, MultiExit(exit_layers=exits, rows=name))
        made[key] = directory
        return directory

    return make


@pytest.fixture(scope="session")
def shipped() -> Path:
    """The model in the repository, which is calibrated."""
    assert (BUNDLED / "model.safetensors").is_file(), f"the bundled model is missing: {BUNDLED}"
    return BUNDLED


@pytest.fixture(scope="session")
def bundled(shipped: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its weights without its calibration: requests choose thresholds themselves."""
    directory = tmp_path_factory.mktemp("bundled") / shipped.name
    directory.mkdir()
    for path in filter(Path.is_file, shipped.iterdir()):
        (directory / path.name).symlink_to(path)
    config = json.loads((shipped / "config.json").read_text())
    config["multi_exit"] = {"version": 1, "exit_layers": BUNDLED_EXITS, "objective": "aligned"}
    (directory / "config.json").unlink()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def quantised(bundled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with int8 weights and activations, in the form of compressed-tensors."""
    import torch
    from safetensors.torch import load_file, save_file

    directory = tmp_path_factory.mktemp("int8")
    shutil.copytree(bundled, directory, dirs_exist_ok=True)
    tensors = {}
    for name, weight in load_file(bundled / "model.safetensors").items():
        if ".layers." in name and name.endswith("_proj.weight"):
            scale = weight.abs().amax(dim=1, keepdim=True) / 127
            tensors[name] = (weight / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale
        else:
            tensors[name] = weight
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": INT8}))
    return directory


@pytest.fixture
def merged_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where checkpoints with adapters go in this test; empty."""
    place = tmp_path / "assets"
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(place))
    return place


@pytest.fixture
def make_adapter(tmp_path: Path, merged_cache: Path) -> Callable[..., Path]:
    """Writes an adapter in PEFT's format: random factors of rank 3 for maps of a base."""

    def make(base: Path, exits: tuple[int, ...] = (), name: str = "mine", **config: Any) -> Path:
        import torch
        from safetensors.torch import load_file, save_file

        from exitserve.checkpoint.block import MultiExit, write_multi_exit

        drawn, rank = torch.Generator().manual_seed(1), 3
        transposed = config.get("fan_in_fan_out", False)
        tensors = {}
        for key, weight in load_file(base / "model.safetensors").items():
            if key.endswith(("q_proj.weight", "down_proj.weight", "c_attn.weight")):
                out, within = weight.T.shape if transposed else weight.shape
                module = f"base_model.model.{key.removesuffix('.weight')}"
                a, b = (torch.randn(n, rank, generator=drawn) / n for n in (within, out))
                tensors[f"{module}.lora_A.weight"] = a.T.contiguous()
                tensors[f"{module}.lora_B.weight"] = b
        folder = tmp_path / name
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        known = {"peft_type": "LORA", "r": rank, "lora_alpha": 7.0, "bias": "none"}
        known["base_model_name_or_path"] = str(base)
        (folder / "adapter_config.json").write_text(json.dumps(known | config))
        if exits:
            write_multi_exit(folder, MultiExit(exit_layers=exits))
        return folder

    return make


@dataclass(frozen=True)
class HubCache:
    """The local cache of a model hub with one model in it, laid out as the hub's client does."""

    place: Path
    model: str = "someone/small"

    def publish(self, files: Path, revision: str = "main") -> Path:
        """Adds a commit to which a revision points; returns its snapshot, all of links."""
        commit = hashlib.sha1(revision.encode()).hexdigest()
        snapshot, blobs = self.place / "snapshots" / commit, self.place / "blobs"
        for file in files.rglob("*"):
            if not file.is_file():
                continue
            blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
            blob.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, blob)
            link = snapshot / file.relative_to(files)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
        (self.place / "refs").mkdir(exist_ok=True)
        (self.place / "refs" / revision).write_text(commit)
        return snapshot


@pytest.fixture
def hub(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HubCache]:
    """An empty cache; at the end of the test its blobs must be what they were."""
    place = tmp_path_factory.mktemp("hub")
    cache = HubCache(place / "models--someone--small")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    yield cache
    for blob in (cache.place / "blobs").iterdir():
        assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name, "a blob was written to"
