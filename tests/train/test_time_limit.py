"""`max_minutes`: a run that ends by the clock, with its learning rate at 0 by then."""

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from .conftest import logged

MakeRecipe = Callable[..., Path]
Train = Callable[..., int]
SECONDS, TICK = 2.4, 0.02


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's clock moves each time it is read, whatever else the machine does."""
    time = SimpleNamespace(perf_counter=count(step=TICK).__next__)
    monkeypatch.setattr("exitserve_training.callbacks.time", time)


@pytest.mark.usefixtures("ticks")
def test_a_run_ends_in_time_with_its_rate_at_zero(
    make_recipe: MakeRecipe, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = {
        "max_steps": 1_000_000,
        "learning_rate": 1e-3,
        "warmup_steps": 5,
        "logging_steps": 1,
        "lr_scheduler_type": "cosine",
    }
    freezing = {"thresholds": [0.0, 0.01], "start": 0.5}
    recipe = make_recipe(max_minutes=SECONDS / 60, training=training, exit_aware=freezing)
    assert train(recipe) == 0
    out = tmp_path / "out"
    report = json.loads((out / "report.json").read_text())
    # It is read three times a step, and a few times more at the end.
    assert SECONDS <= report["seconds"] < SECONDS + 10 * TICK
    steps = logged(out)
    assert report["steps"] == len(steps) == steps[-1]["step"] < 1_000_000
    rates = [entry["learning_rate"] for entry in steps]
    assert rates[0] == 0.0
    assert rates[5] > 0.5e-3, "warmed up by steps"
    assert rates[len(rates) // 2] == pytest.approx(0.5e-3, abs=0.1e-3), "half of the time"
    assert rates[-1] < 1e-5
    began = next(entry["step"] for entry in steps if entry.get("frozen_share"))
    assert 0.45 < began / len(steps) < 0.55, "shares of the run are by the clock too"
    first = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("step 1 ")
    )
    assert "| ends in 0:00:0" in first, "by the clock, not by a million steps"
    weights = load_file(out / "model.safetensors")
    assert train(recipe, "resume=true") == 0
    report = json.loads((out / "report.json").read_text())
    assert report["steps"] <= len(steps) + 1, "its time was over"
    for name, tensor in load_file(out / "model.safetensors").items():
        assert torch.equal(tensor, weights[name]), "the rate was 0"
