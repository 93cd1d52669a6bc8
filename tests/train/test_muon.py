"""Muon with AdamW: what each steps, how far, and that a checkpoint keeps both."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from exitserve.errors import ExitServeError
from exitserve_training.optimizers import MuonWithAdamW, muon_with_adamw

MakeRecipe = Callable[..., Path]
Train = Callable[..., int]

RATE, DECAY = 2e-3, 0.1


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def optimizer_of(model: LlamaForCausalLM) -> MuonWithAdamW:
    decayed = [name for name, _ in model.named_parameters() if "norm" not in name]
    layers: nn.ModuleList = model.model.layers
    arguments = TrainingArguments(learning_rate=RATE, weight_decay=DECAY, use_cpu=True)
    return muon_with_adamw(model, layers, decayed, arguments)


def test_who_steps_what() -> None:
    """Matrices inside the layers are Muon's; embeddings and norms AdamW's, norms undecayed."""
    model = llama()
    names = {id(p): name for name, p in model.named_parameters()}
    groups = optimizer_of(model).param_groups
    found = [{names[id(p)] for p in group["params"]} for group in groups]
    projections = {"self_attn": ("q", "k", "v", "o"), "mlp": ("gate", "up", "down")}
    assert found[0] == {
        f"model.layers.{layer}.{part}.{kind}_proj.weight"
        for layer in (0, 1)
        for part, kinds in projections.items()
        for kind in kinds
    }
    assert found[1] == {"model.embed_tokens.weight"}
    assert found[2] == {name for name in names.values() if "norm" in name}
    assert [group["weight_decay"] for group in groups] == [DECAY, DECAY, 0.0]
    assert sum(map(len, found)) == len(names)


def test_layers_without_a_trained_matrix_are_an_error() -> None:
    model = llama()
    model.model.layers.requires_grad_(False)
    with pytest.raises(ExitServeError, match=r"none of them is trained.*use optimizer=adamw"):
        optimizer_of(model)


def test_a_resumed_run_makes_the_same_steps(
    make_recipe: MakeRecipe, tmp_path: Path, train: Train
) -> None:
    """Through the command, bit for bit; and it learns more than it forgets."""
    training = {
        "max_steps": 9,
        "save_steps": 5,
        "per_device_train_batch_size": 4,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 2,
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    recipe = make_recipe(optimizer="muon", training=training)
    assert train(recipe, f"output_dir={tmp_path / 'whole'}") == 0
    assert train(recipe, "training.max_steps=5") == 0
    assert train(recipe, "resume=true") == 0
    states, weights = [], []
    for folder in (tmp_path / "whole", tmp_path / "out"):
        state = json.loads((folder / "checkpoint-9" / "trainer_state.json").read_text())
        steps: list[dict[str, Any]] = [log for log in state["log_history"] if "loss" in log]
        states.append([(log["step"], log["loss"], log["learning_rate"]) for log in steps])
        weights.append(load_file(folder / "model.safetensors"))
    assert states[0] == states[1]
    assert states[0][-1][1] < 0.9 * states[0][0][1]
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())
    with pytest.raises(ExitServeError, match="recipe key 'optimizer' differs"):
        train(recipe, "resume=true", "optimizer=adamw")
