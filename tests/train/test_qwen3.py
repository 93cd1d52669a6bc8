"""The recipe for Qwen3-0.6B, on a tiny model of its architecture and a data set saved here."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from exitserve.checkpoint import read_multi_exit

RECIPES = Path(__file__).parents[2] / "training" / "recipes"


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-0.6b-lora"])
def test_the_recipe_runs(
    name: str,
    make_checkpoint: Callable[..., Path],
    text_file: Path,
    tmp_path: Path,
    train: Callable[..., int],
) -> None:
    hub = tmp_path / "hub"
    hub.mkdir()
    lines = text_file.read_text(encoding="utf-8").splitlines(keepends=True)
    for split, some in {"train": lines, "validation": lines[:300]}.items():
        rows = "".join(json.dumps({"text": line}) + "\n" for line in some)
        (hub / f"{split}.jsonl").write_text(rows, encoding="utf-8")
    out = tmp_path / "out"
    overrides = {
        "output_dir": out,
        "model": make_checkpoint("qwen3", num_hidden_layers=8),
        "data.dataset": hub,
        "data.dataset_config": "null",
        "data.sequence_length": 64,
        "exit_layers": "[2, 4, 6]",
        "training.max_steps": 2,
        "training.gradient_accumulation_steps": 2,
        "training.warmup_steps": 1,
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
