"""A grown model computes what it grew from, its exits at twice their depth, and then trains."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from exitserve.errors import ExitServeError
from exitserve_training.growth import grow

MakeRecipe = Callable[..., Path]
MakeCheckpoint = Callable[..., Path]
Train = Callable[..., int]


def states(model: Any, ids: Tensor) -> list[Tensor]:
    """Of every depth, the last one normed; and the logits."""
    with torch.no_grad():
        out = model.train(False)(input_ids=ids, output_hidden_states=True)
    return [*out.hidden_states, out.logits]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2", "gemma2"])
@pytest.mark.parametrize("times", [2, 3])
def test_a_grown_model_is_the_same_function(
    make_checkpoint: MakeCheckpoint, family: str, times: int
) -> None:
    """Bit for bit: what is added to the residual stream is zero."""
    model: Any = AutoModelForCausalLM.from_pretrained(make_checkpoint(family), dtype=torch.float32)
    depth = model.config.num_hidden_layers
    deeper = grow(model, times * depth)
    assert deeper.config.num_hidden_layers == times * depth
    ids = torch.arange(2, 50).reshape(2, 24)
    before, after = states(model, ids), states(deeper, ids)
    assert torch.equal(after[-1], before[-1])
    # Gemma 2 mixes kinds of layers: a copy has the window of the layer that it follows.
    for layer in range(depth):
        assert torch.equal(after[times * layer], before[layer]), layer


def test_a_depth_that_is_no_multiple_is_an_error(make_checkpoint: MakeCheckpoint) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(make_checkpoint())
    for layers in (6, 9, 3):
        with pytest.raises(ExitServeError, match="times the 6 layers of the model, such as 12"):
            grow(model, layers)


def test_a_recipe_grows_trains_and_goes_on(
    make_recipe: MakeRecipe, bundled: Path, tmp_path: Path, train: Train
) -> None:
    keys: dict[str, Any] = {
        "config": None,
        "tokenizer": None,
        "model": str(bundled),
        "grow_to_layers": 48,
        "exit_layers": [12, 24, 36],
        "optimizer": "muon",
        "training": {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 2},
    }
    recipe, out = make_recipe(**keys), tmp_path / "out"
    assert train(recipe) == 0
    grown = json.loads((out / "report.json").read_text())
    as_it_was = ["grow_to_layers=null", "exit_layers=[6, 12, 18]"]
    assert train(recipe, f"output_dir={tmp_path / 'shallow'}", *as_it_was) == 0
    same = json.loads((tmp_path / "shallow" / "report.json").read_text())
    for layer in (6, 12, 18, 24):
        was, now = same["initial_layers"][str(layer)], grown["initial_layers"][str(2 * layer)]
        assert now["loss"] == pytest.approx(was["loss"], rel=1e-6)
    config = json.loads((out / "config.json").read_text())
    assert config["num_hidden_layers"] == 48
    assert config["multi_exit"]["exit_layers"] == [12, 24, 36]
    # What was silent has begun to speak.
    model: Any = AutoModelForCausalLM.from_pretrained(out)
    assert model.model.layers[1].self_attn.o_proj.weight.abs().max() > 0
    assert train(recipe, "resume=true", "training.max_steps=3") == 0
    with pytest.raises(ExitServeError, match=r"recipe key 'grow_to_layers' .* differs"):
        train(recipe, "resume=true", *as_it_was)
