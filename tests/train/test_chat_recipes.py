"""The recipes for chat models, on tiny models of their architectures and chats written here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exitserve.checkpoint.block import read_multi_exit

pytestmark = pytest.mark.nightly

RECIPES = Path(__file__).parents[2] / "training" / "recipes"
NAMES = {
    "smollm2-135m": "llama",
    "llama-3.2-1b": "llama",
    "qwen3-0.6b": "qwen3",
    "qwen3-0.6b-lora": "qwen3",
}


@pytest.mark.parametrize("name", NAMES)
def test_the_recipe_runs(
    name: str,
    make_checkpoint: Callable[..., Path],
    with_template: Callable[[Path], Path],
    chat_row: Callable[..., dict[str, Any]],
    write_rows: Callable[..., Path],
    tmp_path: Path,
    train: Callable[..., int],
) -> None:
    """All of it but that the model writes the chats, which tests/train/test_own_chats.py does."""
    chats = write_rows(tmp_path / "chats.jsonl", [chat_row(number) for number in range(200)])
    out = tmp_path / "out"
    overrides = {
        "output_dir": out,
        "model": with_template(make_checkpoint(NAMES[name], num_hidden_layers=8)),
        "data.own_chats": "null",
        "data.files": f"[{chats}]",
        "data.sequence_length": 128,
        "exit_layers": "[2, 4, 6]",
        "compile_layers": "false",  # which takes longer than all else
        "training.max_steps": 2,
        "training.per_device_train_batch_size": 2,
        "training.gradient_accumulation_steps": 2,
        "training.save_steps": 2,
        "training.disable_tqdm": "true",
    }
    given = [f"{key}={value}" for key, value in overrides.items()]
    assert train(RECIPES / f"{name}.yaml", *given, "--estimate") == 0
    assert not out.exists()
    assert train(RECIPES / f"{name}.yaml", *given) == 0
    block = read_multi_exit(out)
    assert block is not None and block.exit_layers == (2, 4, 6)
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert set(report["layers"]) == {"2", "4", "6", "8"}
    assert report["metrics"]["kl_to_last_loss"] >= 0
