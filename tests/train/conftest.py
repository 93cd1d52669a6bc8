"""Small models, texts and recipes, and the `train` command as the tests call it."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from exitserve_training.commands import add_commands


@pytest.fixture(scope="session")
def train() -> Callable[..., int]:
    """`exitserve train RECIPE key=value ...`, in this process; errors are raised."""

    def run(recipe: Path, *overrides: str) -> int:
        parser = argparse.ArgumentParser()
        add_commands(parser.add_subparsers())
        args = parser.parse_args(["train", str(recipe), *overrides])
        return int(args.run(args))

    return run


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text with something to learn: lines of a few words in a fixed order."""
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    generator = torch.Generator().manual_seed(0)
    words = ["alpha", "beta", "gamma", "delta", "return", "self", "value", "name"]
    lines = []
    for _ in range(3000):
        start = int(torch.randint(len(words), (), generator=generator))
        lines.append(" ".join(words[(start + i) % len(words)] for i in range(6)))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def make_recipe(tmp_path: Path, text_file: Path) -> Callable[..., Path]:
    """Writes a recipe of a run of seconds; keyword arguments replace its keys."""

    def make(**keys: Any) -> Path:
        tree: dict[str, Any] = {
            "output_dir": str(tmp_path / "out"),
            "config": {
                "architecture": "llama",
                "num_hidden_layers": 4,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "max_position_embeddings": 64,
            },
            "tokenizer": {"train_bpe": {"vocab_size": 300}},
            "data": {"files": [str(text_file)], "sequence_length": 32, "validation_blocks": 8},
            "exit_layers": [1, 2],
            "training": {
                "max_steps": 4,
                "per_device_train_batch_size": 4,
                "learning_rate": 1e-3,
                "logging_steps": 2,
                "disable_tqdm": True,
            },
        }
        tree.update(keys)
        tree = {key: value for key, value in tree.items() if value is not None}
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        return path

    return make
