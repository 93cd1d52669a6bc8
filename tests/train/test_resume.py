"""A resumed run makes the same steps as one that was never stopped, or says why it cannot."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from exitserve.errors import ExitServeError

from ..shapes import BERT, LLAMA
from .conftest import STOPPED, logged

MakeRecipe = Callable[..., Path]
Train = Callable[..., int]

EVERYTHING: dict[str, Any] = {
    "exit_layers": [1, 2, 3],
    "objectives": [
        {"name": "aligned", "sample": 1},
        {"name": "simreg", "weight": 0.5},
        # A second view under dropout: draws from the process's generator.
        {"name": "simcse", "weight": 0.1},
        {"name": "dispersion", "weight": 0.05, "layers": [2, 4]},
        {"name": "nitp", "weight": 0.2},
        {"name": "nitp", "weight": 0.1, "target_layer": 2},
    ],
    "exit_aware": {"share": 0.75, "thresholds": [0.01, 0.1]},
    "bf16": True,
}
RUNS: dict[str, dict[str, Any]] = {
    # Two steps of AdaGC's warm-up, so that its averages clip on both sides of the stop.
    "everything, AdaGC": {**EVERYTHING, "adagc": {"warmup_steps": 2}},
    "everything, checkpointed": {
        **EVERYTHING,
        "exit_aware": {"thresholds": [0.01, 0.1], "start": 0.3},
        "bf16": False,
        "training": {**STOPPED, "gradient_checkpointing": True},
    },
    "muon": {"optimizer": "muon"},
    "classifiers": {"objectives": ["separate_classifiers"]},
    "headless": {"objectives": ["headless"], "config": {**LLAMA, "tie_word_embeddings": False}},
    # Its dropout draws from the process's generator, its masks from the sequence and the step.
    "bert": {"config": BERT, "objectives": ["aligned"], "exit_layers": [1, 2]},
    "headless bert": {"config": BERT, "objectives": ["headless"], "exit_layers": []},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_makes_the_same_steps(resumes: Callable[..., None], name: str) -> None:
    resumes(**RUNS[name])


def test_the_learning_rate_of_the_recipe_holds_in_a_resumed_run(
    stopped: Callable[..., tuple[Path, Path]], train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Trainer's own scheduler would go on with the old one, whatever the recipe says."""
    recipe, out = stopped()
    assert train(recipe, "resume=true", "training.learning_rate=0.001") == 0
    rates = [entry["learning_rate"] for entry in logged(out)]
    whole = [0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / 9)).item()) for step in range(9)]
    expected = [share * (1e-2 if step < 5 else 1e-3) for step, share in enumerate(whole)]
    assert rates == pytest.approx(expected)
    changed = "goes by the recipe's training.learning_rate (0.001 instead of 0.01)"
    assert changed in capsys.readouterr().out
    # A run that is finished makes no further step, and leaves what it left.
    weights = load_file(out / "model.safetensors")
    shutil.copytree(out / "checkpoint-9", out / "checkpoint-12")
    os.truncate(out / "checkpoint-12" / "model.safetensors", 5000)
    assert train(recipe, "resume=true", "training.learning_rate=0.001") == 0
    printed = capsys.readouterr().out
    assert "the run is finished" in printed
    assert "-12/model.safetensors' is damaged, so the run goes on from " in printed
    assert "goes by" not in printed
    assert not list(out.glob("checkpoint-1[01]"))
    again = load_file(out / "model.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())


CHANGES = {
    "adagc={ratio: 1.1}": "recipe key 'adagc' .* differs",
    "seed=1": r"recipe key 'seed' \(1 instead of 0\) differs",
    "data.sequence_length=16": r"recipe key 'data.sequence_length' \(16 instead of 32\) differs",
    "optimizer=muon": r"recipe key 'optimizer' \('muon' instead of 'adamw'\) differs",
    "objectives=[ce, nitp]": "objective parameters",
    "training.weight_decay=0.1": "recipe key 'training.weight_decay' .* differs",
    # Trains no head, so the optimizer has fewer parameters.
    "objectives=[headless]": "optimizer state",
}


def test_what_cannot_be_resumed_says_so_in_one_line(
    stopped: Callable[..., tuple[Path, Path]], train: Train
) -> None:
    recipe, out = stopped()
    for change, reason in CHANGES.items():
        with pytest.raises(ExitServeError, match=reason) as raised:
            train(recipe, "resume=true", change)
        assert "\n" not in str(raised.value)
    os.truncate(out / "checkpoint-5" / "optimizer.pt", 5000)
    with pytest.raises(ExitServeError, match=r"checkpoint-5/optimizer\.pt' is damaged; start"):
        train(recipe, "resume=true")
