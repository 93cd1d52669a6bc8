"""A run that is watched and stopped from outside: its lines, and SIGTERM."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerControl, TrainerState, TrainingArguments

from exitserve_training.callbacks import ProgressLines, StopOnTerm

from .conftest import logged

MakeRecipe = Callable[..., Path]
Train = Callable[..., int]


def test_a_line_tells_tokens_speed_losses_and_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    times = iter([100.0, 104.0, 110.0])
    monkeypatch.setattr("exitserve_training.callbacks.time.perf_counter", lambda: next(times))
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    # A resumed run: what came before this session counts as tokens, not as speed.
    state = TrainerState(global_step=20, max_steps=100, num_input_tokens_seen=2_000_000)
    lines, control = ProgressLines(lambda *_: None), TrainerControl()
    lines.on_train_begin(arguments, state, control)
    state.global_step, state.num_input_tokens_seen = 30, 3_000_000
    logs = {"loss": 2.5, "learning_rate": 1e-3, "loss_layer_3": 3.25, "loss_layer_6": 2.0}
    lines.on_log(arguments, state, control, logs=logs)
    state.global_step, state.num_input_tokens_seen = 40, 4_000_000
    lines.on_log(arguments, state, control, logs={"loss": 2.25})
    lines.on_log(arguments, state, control, logs={"eval_loss": 2.0, "eval_loss_layer_6": 2.0})
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "step 30 of 100 | 3,000,000 tokens, 250,000 tokens/s | loss 2.5000 (at layer 3: 3.2500, "
        "6: 2.0000) | lr 1.00e-03 | ends in 0:00:28, "
    )
    # 0.5 s a step over the session; 1M tokens in the 6 s since the line before.
    assert "166,667 tokens/s | loss 2.2500 |" in second
    assert "ends in 0:00:30, " in second
    assert third == "step 40 | held out: loss 2.0000 (at layer 6: 2.0000)"


def test_a_signal_saves_once_and_a_second_is_not_held_up(tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    stop, state, control = StopOnTerm(), TrainerState(), TrainerControl()
    before = signal.getsignal(signal.SIGTERM)
    stop.on_train_begin(arguments, state, control)
    signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
    stop.on_step_end(arguments, state, control)
    assert control.should_save
    assert control.should_training_stop


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, "the run ended before it was told to"
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(
    make_recipe: MakeRecipe, tmp_path: Path, train: Train, end: signal.Signals
) -> None:
    """The real command. SIGTERM loses no step; SIGKILL those since the last checkpoint."""
    training = {
        "max_steps": 400,
        "save_steps": 7,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        # The rate of a step must not depend on how many there are.
        "lr_scheduler_type": "constant",
    }
    # Without alternation every line has the loss at each exit.
    objectives = [{"name": "aligned", "alternate": False}]
    recipe, out = make_recipe(training=training, objectives=objectives), tmp_path / "out"
    log = tmp_path / "log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        command = [sys.executable, "-m", "exitserve", "train", str(recipe)]
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, text=True)
        wait_for(lambda: any(out.glob("checkpoint-*/trainer_state.json")), process)
        process.send_signal(end)
        code = process.wait(timeout=120)
    said = log.read_text()
    # What no signal can interrupt is not tested: a step that is the last of the 400.
    newest = max(int(path.name.split("-")[1]) for path in out.glob("checkpoint-*"))
    if end == signal.SIGTERM:
        assert code == 143
        found = re.search(r"stopped by SIGTERM after step (\d+) of 400.*resume=true", said)
        assert found, said
        assert int(found[1]) == newest
        assert not (out / "model.safetensors").exists()
    else:
        assert code == -signal.SIGKILL
    steps = [
        int(n) for n in re.findall(r"^step (\d+) of 400 \|.* \(at layer 1: ", said, re.MULTILINE)
    ]
    assert steps == list(range(1, len(steps) + 1))
    to = newest + 5
    assert train(recipe, "resume=true", f"training.max_steps={to}") == 0
    whole = f"output_dir={tmp_path / 'whole'}"
    assert train(recipe, whole, f"training.max_steps={to}") == 0
    losses = [[entry["loss"] for entry in logged(one)] for one in (out, tmp_path / "whole")]
    assert len(losses[0]) == to
    # Other numbers of threads add in another order.
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    weights = [load_file(f / "model.safetensors") for f in (out, tmp_path / "whole")]
    for name, tensor in weights[1].items():
        torch.testing.assert_close(weights[0][name], tensor, rtol=1e-2, atol=1e-4)


def test_an_interrupted_run_says_how_to_go_on(
    make_recipe: MakeRecipe,
    tmp_path: Path,
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("exitserve_training.pipeline.train", interrupted)
    recipe, kept = make_recipe(), tmp_path / "out" / "checkpoint-7"
    with pytest.raises(KeyboardInterrupt):
        train(recipe)
    assert capsys.readouterr().err == ""
    kept.mkdir(parents=True)
    (kept / "trainer_state.json").write_text("{}")
    save_file({}, kept / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.save({}, kept / name)
    with pytest.raises(KeyboardInterrupt):
        train(recipe)
    assert f"{kept}: the same command with resume=true" in capsys.readouterr().err
