"""`max_minutes`: a run that ends by the clock, with its learning rate at 0 by then."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerControl, TrainerState, TrainingArguments

from exitserve.errors import ExitServeError
from exitserve_training.recipe import parse_recipe
from exitserve_training.time_limit import TimeLimit

MakeRecipe = Callable[..., Path]
Train = Callable[..., int]
SECONDS, TICK = 2.4, 0.02


def logged(out: Path) -> list[dict[str, Any]]:
    """What the newest checkpoint's history has of each step."""
    newest = max(out.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    state = json.loads((newest / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry]


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
    freezing = {"select": "random", "start": 0.5}
    recipe = make_recipe(max_minutes=SECONDS / 60, training=training, exit_aware=freezing)
    assert train(recipe) == 0
    out = tmp_path / "out"
    report = json.loads((out / "report.json").read_text())
    # It is read twice a step, and a few times more at the end.
    assert SECONDS <= report["seconds"] < SECONDS + 10 * TICK
    steps = logged(out)
    assert report["steps"] == len(steps) == steps[-1]["step"] < 1_000_000
    rates = [entry["learning_rate"] for entry in steps]
    assert rates[0] == 0.0
    assert rates[5] > 0.5e-3, "warmed up by steps"
    assert rates[30] == pytest.approx(0.5e-3, abs=0.1e-3), "half of the time"
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


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_the_rate_falls_by_the_clock_or_by_steps(tmp_path: Path, kind: str) -> None:
    clock = 0.0
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, lr_scheduler_type=kind, warmup_steps=10
    )
    limit, state, control = TimeLimit(100.0, lambda: clock), TrainerState(), TrainerControl()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    rates = limit.scheduler(optimizer, arguments, 1000)

    def after(steps: int, seconds: float) -> float:
        nonlocal clock
        clock = seconds
        limit.on_optimizer_step(arguments, state, control)
        for _ in range(steps):
            optimizer.step()
            rates.step()
        return float(rates.get_last_lr()[0])

    assert after(5, 0.0) == pytest.approx(0.5, abs=0.01)
    assert after(5, 50.0) == pytest.approx(0.5)
    assert limit.seconds_left == 50.0
    assert after(740, 50.0) < 0.3, "750 of 1,000 steps"
    assert after(1, 100.0) == 0.0
    limit.on_step_end(arguments, state, control)
    assert control.should_training_stop and control.should_save
    arguments.warmup_steps, clock = 0.2, 10.0
    limit.on_train_begin(arguments, state, control)
    rate = limit.scheduler(optimizer, arguments, 10_000).lr_lambdas[0](1)
    assert 0.4 < rate < 0.5, "half of a warmup that is a share of the run"


def test_other_schedules_are_refused() -> None:
    tree = {"output_dir": "x", "model": "x", "data": {"files": ["x"]}, "max_minutes": 1.0}
    with pytest.raises(ExitServeError, match="must be linear or cosine, not constant"):
        parse_recipe({**tree, "training": {"lr_scheduler_type": "constant"}})
    with pytest.raises(ExitServeError, match="max_minutes"):
        parse_recipe({**tree, "max_minutes": 0})
