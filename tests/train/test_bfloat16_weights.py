"""Weights in bfloat16: steps below their precision are not lost, and runs resume."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import TrainingArguments

from exitserve.errors import ExitServeError
from exitserve_training.optimizers import kahan_adamw
from exitserve_training.recipe import load_recipe

MakeRecipe = Callable[..., Path]
Train = Callable[..., int]

BF16 = {"weights": "bfloat16", "bf16": True}


def test_small_steps_add_up(tmp_path: Path) -> None:
    """40 steps of 1e-4 from 1.0, where bfloat16 has nothing between 0.996 and 1."""
    pytest.importorskip("optimi", reason="bfloat16 weights need torch-optimi, the extra `bf16`")
    model = nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    arguments = TrainingArguments(str(tmp_path), learning_rate=1e-4, use_cpu=True)
    plain = torch.optim.AdamW([nn.Parameter(model.weight.detach().clone())], lr=1e-4)
    kahan = kahan_adamw(model, ["weight"], arguments)
    for optimizer in (plain, kahan):
        (weight,) = optimizer.param_groups[0]["params"]
        for _ in range(40):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
    assert (plain.param_groups[0]["params"][0] == 1.0).all()
    assert (model.weight == 0.99609375).all()


def test_a_run_keeps_weights_in_bfloat16_and_resumes(
    make_recipe: MakeRecipe, tmp_path: Path, train: Train
) -> None:
    pytest.importorskip("optimi", reason="bfloat16 weights need torch-optimi, the extra `bf16`")
    recipe = make_recipe(objectives=["aligned", {"name": "nitp", "weight": 0.1}], **BF16)
    assert train(recipe, "training.save_steps=2") == 0
    out = tmp_path / "out"
    whole = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in whole.values()} == {torch.bfloat16}
    states = torch.load(out / "checkpoint-2" / "optimizer.pt", weights_only=True)["state"]
    assert any(state.get("kahan_comp") is not None for state in states.values())
    shutil.rmtree(out / "checkpoint-4")
    assert train(recipe, "training.save_steps=2", "resume=true") == 0
    for name, tensor in load_file(out / "model.safetensors").items():
        torch.testing.assert_close(tensor, whole[name])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"weights": "bfloat16"}, "set bf16: true"),
        ({**BF16, "optimizer": "muon"}, "AdamW with Kahan sums"),
        ({**BF16, "training": {"optim": "adafactor"}}, "AdamW with Kahan sums"),
    ],
)
def test_what_loses_small_steps_is_refused(
    make_recipe: MakeRecipe, keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ExitServeError, match=message):
        load_recipe(make_recipe(**keys))
