"""Muon with AdamW: what each steps, and how far."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainingArguments

from exitserve.errors import ExitServeError
from exitserve_training.models import build_config, build_model
from exitserve_training.optimizers import MuonWithAdamW, muon_with_adamw

from ..shapes import LLAMA

RATE, DECAY = 2e-3, 0.1


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "vocab_size": 64, "tie_word_embeddings": True}
    return build_model(build_config({**LLAMA, **sizes}))


def optimizer_of(model: Any) -> MuonWithAdamW:
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
    model.requires_grad_(False)
    model.model.layers[0].mlp.requires_grad_(True)  # as with adapters: all are matrices
    assert len(optimizer_of(model).param_groups) == 1
