"""Mixtures of experts: the routers' balancing loss, and every objective on such a model."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exitserve_training.forward import ExitPass
from exitserve_training.objectives.aligned.options import CrossEntropyOptions
from exitserve_training.objectives.registry import OBJECTIVES
from exitserve_training.routers import router_balance

from ..shapes import LLAMA
from .conftest import history
from .passes import random_ids, wrap

MIXTURES = ["mixtral", "qwen3_moe"]


def gate(model: Any) -> Tensor:
    """The first layer's router."""
    layer = model.model.layers[0]
    mixture = getattr(layer, "block_sparse_moe", None) or layer.mlp
    weight: Tensor = mixture.gate.weight
    return weight


@pytest.mark.parametrize("family", MIXTURES)
def test_the_loss_is_that_of_the_model_s_own_forward(
    load: Callable[[str], Any], family: str
) -> None:
    model, ids = load(family), random_ids(2, 12)
    padded = torch.ones_like(ids)
    padded[1, 7:] = 0
    labels = ids.masked_fill(padded == 0, -100)
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = 0.5
    own = model(input_ids=ids, attention_mask=padded, labels=labels, output_router_logits=True)
    batch = {"input_ids": ids, "attention_mask": padded, "labels": labels}
    wrapped = wrap(model, CrossEntropyOptions())
    without, _ = model(**batch, exit_pass=ExitPass(0))
    wrapped.remove()
    wrap(model, CrossEntropyOptions(), balance=router_balance(model.config))
    loss, metrics = model(**batch, exit_pass=ExitPass(0))
    torch.testing.assert_close(loss, own.loss)
    torch.testing.assert_close(metrics["router_loss"], own.aux_loss.detach())
    torch.testing.assert_close(loss - without, 0.5 * own.aux_loss)
    (moved,) = torch.autograd.grad(loss - without.detach(), gate(model), retain_graph=True)
    (plain,) = torch.autograd.grad(without, gate(model))
    assert (moved - plain).abs().max() > 1e-6


def test_models_without_routers_have_no_balance(load: Callable[[str], Any]) -> None:
    assert router_balance(load("llama").config) is None
    config = load("mixtral").config
    config.router_aux_loss_coef = 0.0
    assert router_balance(config) is None


TOGETHER = [
    # What excludes each other: `ce` and `aligned`, `headless` and `separate_classifiers`.
    sorted(OBJECTIVES.keys() - {"ce", "headless"}),
    ["ce", "headless"],
]


@pytest.mark.parametrize("names", TOGETHER, ids=["all others", "ce and headless"])
def test_every_objective_runs_on_a_mixture_of_a_streamed_source(
    make_recipe: Callable[..., Path],
    text_file: Path,
    tmp_path: Path,
    train: Callable[..., int],
    names: list[str],
) -> None:
    assert {name for run in TOGETHER for name in run} == OBJECTIVES.keys()
    sizes = {
        **LLAMA,
        "architecture": "mixtral",
        "num_local_experts": 4,
        "router_aux_loss_coef": 0.02,
    }
    lines = text_file.read_text(encoding="utf-8").splitlines()
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    recipe = make_recipe(
        config=sizes,
        exit_layers=[1],
        data={"files": [str(rows)], "order": "source", "sequence_length": 32},
        objectives=names,
    )
    assert train(recipe, "training.save_steps=4") == 0
    logged = history(tmp_path / "out" / "checkpoint-4")
    found = {name: value for entry in logged for name, value in entry.items()}
    assert {f"{name}_loss" for name in names} <= found.keys()
    assert all(math.isfinite(found[f"{name}_loss"]) for name in names)
    # Two of four experts for each token: 2 with even shares, times 2 where two take all.
    assert all(1.9 < entry["router_loss"] < 4.1 for entry in logged if "router_loss" in entry)
    assert "router_loss" in found
