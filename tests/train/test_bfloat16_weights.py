"""Weights in bfloat16: steps below their precision are not lost, and runs resume."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import TrainingArguments

from exitserve_training.optimizers import kahan_adamw


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
    resumes: Callable[..., None], tmp_path: Path
) -> None:
    pytest.importorskip("optimi", reason="bfloat16 weights need torch-optimi, the extra `bf16`")
    objectives = ["aligned", {"name": "nitp", "weight": 0.1}]
    resumes(objectives=objectives, weights="bfloat16", bf16=True)
    out = tmp_path / "out"
    weights = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    states = torch.load(out / "checkpoint-9" / "optimizer.pt", weights_only=True)["state"]
    assert any(state.get("kahan_comp") is not None for state in states.values())
