"""A loss or gradient that is not finite ends the run before it spoils anything."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from exitserve.errors import ExitServeError
from exitserve_training import pipeline
from exitserve_training.objectives import weighted_sum
from exitserve_training.objectives.objective import LossInputs
from exitserve_training.trainer import MultiExitTraining

MakeRecipe = Callable[..., Path]
Train = Callable[..., int]
Poison = Callable[[Tensor, LossInputs], Tensor]

TRAINING = {
    "max_steps": 6,
    "save_steps": 1,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "disable_tqdm": True,
}
RUN = {"objectives": ["ce", {"name": "nitp", "weight": 0.2}], "training": TRAINING}


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Poison], list[Tensor]]:
    """Changes the ce loss of one step of training; returns the labels that it was given then."""
    original = weighted_sum.read_together

    def apply(step: int, change: Poison) -> list[Tensor]:
        labels: list[Tensor] = []

        def read(asked: Any, batch: LossInputs) -> Any:
            total, told = original(asked, batch)
            if batch.step != step or not torch.is_grad_enabled():
                return total, told
            labels.append(batch.labels)
            loss, metrics = told["ce"]
            return change(total, batch), {**told, "ce": (change(loss, batch), metrics)}

        monkeypatch.setattr(weighted_sum, "read_together", read)
        return labels

    return apply


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], MultiExitTraining]]:
    """The trainer of the last run."""
    made: list[MultiExitTraining] = []
    original = pipeline._trainer

    def keep(*args: Any) -> MultiExitTraining:
        made.append(original(*args))
        return made[-1]

    monkeypatch.setattr(pipeline, "_trainer", keep)
    yield lambda: made[-1]


def to_nan(loss: Tensor, _batch: LossInputs) -> Tensor:
    return loss * torch.nan


def to_infinity(loss: Tensor, _batch: LossInputs) -> Tensor:
    return loss / 0.0


def nan_gradient(loss: Tensor, batch: LossInputs) -> Tensor:
    """The same value: sqrt(0) is 0, and its derivative infinity times 0."""
    return loss + (batch.hidden[4].sum() * 0.0).sqrt()


@pytest.mark.parametrize("change", [to_nan, to_infinity])
def test_a_loss_that_is_not_finite_ends_the_run_with_its_batch(
    make_recipe: MakeRecipe,
    tmp_path: Path,
    train: Train,
    poison: Callable[[int, Poison], list[Tensor]],
    trainer: Callable[[], MultiExitTraining],
    change: Poison,
) -> None:
    """The second micro-batch of step 4 (from 0), after the checkpoints of 1 to 4."""
    clean = make_recipe(**RUN)
    assert train(clean, f"output_dir={tmp_path / 'clean'}") == 0
    out = tmp_path / "out"
    poison(3, change)
    with pytest.raises(ExitServeError) as raised:
        train(clean)
    message = str(raised.value)
    assert "\n" not in message
    assert "loss of objective ce = " in message
    assert "nitp" not in message
    assert "at step 3; " in message
    assert f"the last good checkpoint is '{out / 'checkpoint-2'}'" in message
    # The weights of checkpoint 3 are those that gave this loss, so it is not to be resumed from.
    kept = sorted(path.name for path in out.glob("*checkpoint-*"))
    assert kept == ["bad-checkpoint-3", "checkpoint-2"]
    assert not (out / "model.safetensors").exists()
    assert all(parameter.isfinite().all() for parameter in trainer().model.parameters())

    # Without the poison, the checkpoint that was named goes on to where the clean run ended.
    poison(-1, change)
    assert train(clean, "resume=true") == 0
    expected = load_file(tmp_path / "clean" / "model.safetensors")
    found = load_file(out / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("clipping", "adagc"), [(1.0, None), (0.0, None), (0.0, {"warmup_steps": 2})]
)
def test_a_gradient_that_is_not_finite_ends_the_run_before_the_step(
    make_recipe: MakeRecipe,
    tmp_path: Path,
    train: Train,
    poison: Callable[[int, Poison], list[Tensor]],
    trainer: Callable[[], MultiExitTraining],
    clipping: float,
    adagc: dict[str, Any] | None,
) -> None:
    training = {**TRAINING, "max_grad_norm": clipping, "gradient_accumulation_steps": 2}
    poison(3, nan_gradient)
    with pytest.raises(ExitServeError, match="gradients at step 3 are not finite") as raised:
        train(make_recipe(**{**RUN, "training": training, "adagc": adagc}))
    assert "\n" not in str(raised.value)
    out = tmp_path / "out"
    assert f"the last good checkpoint is '{out / 'checkpoint-2'}'" in str(raised.value)
    saved = load_file(out / "bad-checkpoint-3" / "model.safetensors")
    now = trainer().language_model.state_dict()
    for name, tensor in saved.items():
        assert tensor.isfinite().all()
        assert torch.equal(now[name], tensor)
    projector = load_file(out / "bad-checkpoint-3" / "objectives.safetensors")
    for name, tensor in trainer().multi_exit.objectives.state_dict().items():
        assert torch.equal(projector[name], tensor)
