"""`exitserve train --estimate`: what is counted is right, and nothing is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from exitserve.cli import main
from exitserve_training.adapters import with_adapters
from exitserve_training.estimate import estimate
from exitserve_training.recipe import load_recipe

from ..shapes import LLAMA

SIZES = {"hidden_size": 64, "head_dim": 48, "vocab_size": 300, "tie_word_embeddings": True}
QWEN3 = {**LLAMA, "architecture": "qwen3", **SIZES}


@pytest.mark.parametrize("objectives", [["aligned"], ["separate_classifiers"], ["ce", "nitp"]])
def test_parameters_are_those_of_the_run(
    make_recipe: Callable[..., Path],
    tmp_path: Path,
    train: Callable[..., int],
    objectives: list[Any],
) -> None:
    path = make_recipe(config=QWEN3, objectives=objectives)
    found = estimate(load_recipe(path))
    assert not (tmp_path / "out").exists()
    assert train(path, "training.max_steps=1", "training.save_steps=1") == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.parameters == model.num_parameters()
    # AdamW's two moments of each are the bulk of its state.
    state = (tmp_path / "out" / "checkpoint-1" / "optimizer.pt").stat().st_size
    assert found.bytes_of["optimizer states"] == pytest.approx(state, rel=0.15)
    assert found.tokens_per_step == 4 * 32


def test_adapters_and_teachers_count(
    make_recipe: Callable[..., Path], make_checkpoint: Callable[..., Path]
) -> None:
    model = make_checkpoint("llama")
    keys: dict[str, Any] = {"config": None, "tokenizer": None, "model": str(model)}
    teacher = ["ce", {"name": "kl_to_last", "teacher": "initial", "layers": [2]}]
    recipe = load_recipe(make_recipe(**keys, objectives=teacher, lora={"rank": 4}))
    found = estimate(recipe)
    assert recipe.lora is not None
    adapted = with_adapters(AutoModelForCausalLM.from_pretrained(model), recipe.lora)
    assert found.trained == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert found.bytes_of["a frozen teacher's"] == found.bytes_of["weights"]
    whole = estimate(load_recipe(make_recipe(**keys, objectives=["ce"])))
    assert whole.trained == whole.parameters
    assert whole.total_bytes > found.total_bytes - found.bytes_of["weights"]


def test_the_command_prints_and_writes_nothing(
    make_recipe: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(make_recipe()), "--estimate"]) == 0
    printed = capsys.readouterr().out
    for what in ("memory in all, about", "a step, at least", "4 steps, at least", "gradients"):
        assert what in printed
    assert not (tmp_path / "out").exists()
