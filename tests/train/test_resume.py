"""A resumed run makes the same steps as one that was never stopped.

All runs stop after 5 of 9 steps: 5 is odd, so whatever alternates has to go on with its second
half, and the 3 steps of an epoch do not divide it, so the order of the data has to go on too.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from exitserve.errors import ExitServeError

MakeRecipe = Callable[..., Path]
Train = Callable[..., int]

TIMES = {"train_runtime", "train_tokens_per_second", "eval_runtime", "mfu"}
TRAINING = {
    "max_steps": 9,
    "save_steps": 5,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "logging_steps": 1,
    "disable_tqdm": True,
}

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
LLAMA = {
    "architecture": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
# Its dropout draws from the process's generator, its masks from the sequence and the step.
BERT = {
    "architecture": "bert",
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}

RUNS: dict[str, dict[str, Any]] = {
    # Two steps of AdaGC's warm-up, so that its averages clip on both sides of the stop.
    "everything, AdaGC": {**EVERYTHING, "adagc": {"warmup_steps": 2}},
    "everything, checkpointed": {
        **EVERYTHING,
        "exit_aware": {"thresholds": [0.01, 0.1], "start": 0.3},
        "bf16": False,
        "training": {**TRAINING, "gradient_checkpointing": True},
    },
    "classifiers": {"objectives": ["separate_classifiers"]},
    "headless": {"objectives": ["headless"], "config": {**LLAMA, "tie_word_embeddings": False}},
    "bert": {"config": BERT, "objectives": ["aligned"], "exit_layers": [1, 2]},
    "headless bert": {"config": BERT, "objectives": ["headless"], "exit_layers": []},
}


@pytest.fixture
def short_text(tmp_path: Path, text_file: Path) -> Path:
    """A text of three optimizer steps, so that runs stop inside their second epoch."""
    path = tmp_path / "short.txt"
    lines = text_file.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(lines[:140]), encoding="utf-8")
    return path


@pytest.fixture
def stopped(
    make_recipe: MakeRecipe, short_text: Path, tmp_path: Path, train: Train
) -> Callable[..., tuple[Path, Path]]:
    """Runs a recipe to its end; returns the recipe, and the run's folder as stopped after step 5.

    The whole run is kept beside it, as `whole`.
    """

    def run(**keys: Any) -> tuple[Path, Path]:
        data = {"files": [str(short_text)], "sequence_length": 32, "validation_fraction": 0.2}
        recipe = make_recipe(**{"data": data, "training": TRAINING, **keys})
        out = tmp_path / "out"
        assert train(recipe) == 0
        shutil.copytree(out, tmp_path / "whole")
        shutil.rmtree(out / "checkpoint-9")
        (out / "model.safetensors").unlink()
        (out / "report.json").unlink()
        return recipe, out

    return run


def history(folder: Path) -> list[dict[str, Any]]:
    """What was logged, but for how long it took."""
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    entries: list[dict[str, Any]] = state["log_history"]
    return [{k: v for k, v in entry.items() if k not in TIMES} for entry in entries]


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_makes_the_same_steps(
    stopped: Callable[..., tuple[Path, Path]], tmp_path: Path, train: Train, name: str
) -> None:
    """Bit for bit: the same operations on the same numbers, by as many threads."""
    recipe, out = stopped(**RUNS[name])
    whole = tmp_path / "whole"
    assert train(recipe, "resume=true") == 0
    expected, found = history(whole / "checkpoint-9"), history(out / "checkpoint-9")
    steps = [entry["step"] for entry in expected if "loss" in entry]
    assert steps == list(range(1, 10))
    assert max(entry["epoch"] for entry in expected) == 3
    # The first entry is the evaluation before training, which a checkpoint has too.
    assert found == expected
    files = [Path("model.safetensors"), *(p.relative_to(whole) for p in whole.glob("c*-9/*.saf*"))]
    assert len(files) == 2 + (whole / "checkpoint-9" / "objectives.safetensors").is_file()
    for file in files:
        saved, again = load_file(whole / file), load_file(out / file)
        assert saved.keys() == again.keys()
        assert all(torch.equal(again[key], tensor) for key, tensor in saved.items()), file
    reports = [json.loads((folder / "report.json").read_text()) for folder in (whole, out)]
    for key in ("layers", "metrics", "tokens_seen", "steps", "parameters"):
        assert reports[1][key] == reports[0][key]


def test_the_learning_rate_of_the_recipe_holds_in_a_resumed_run(
    stopped: Callable[..., tuple[Path, Path]], train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Trainer's own scheduler would go on with the old one, whatever the recipe says."""
    recipe, out = stopped()
    assert train(recipe, "resume=true", "training.learning_rate=0.001") == 0
    rates = [entry["learning_rate"] for entry in history(out / "checkpoint-9") if "loss" in entry]
    whole = [0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / 9)).item()) for step in range(9)]
    expected = [share * (1e-2 if step < 5 else 1e-3) for step, share in enumerate(whole)]
    assert rates == pytest.approx(expected)
    changed = "goes by the recipe's training.learning_rate (0.001 instead of 0.01)"
    assert changed in capsys.readouterr().out
    # A run that is finished makes no further step, and leaves what it left.
    weights = load_file(out / "model.safetensors")
    assert train(recipe, "resume=true", "training.learning_rate=0.001") == 0
    printed = capsys.readouterr().out
    assert "the run is finished" in printed
    assert "goes by" not in printed
    assert not list(out.glob("checkpoint-1?"))
    again = load_file(out / "model.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())


CHANGES = {
    "adagc={ratio: 1.1}": "recipe key 'adagc' .* differs",
    "seed=1": r"recipe key 'seed' \(1 instead of 0\) differs",
    "data.sequence_length=16": r"recipe key 'data.sequence_length' \(16 instead of 32\) differs",
    "objectives=[ce, nitp]": "objective parameters",
    "training.weight_decay=0.1": "recipe key 'training.weight_decay' .* differs",
    # Trains no head, so the optimizer has fewer parameters.
    "objectives=[headless]": "optimizer state",
}


def test_what_cannot_be_resumed_says_so_in_one_line(
    stopped: Callable[..., tuple[Path, Path]], train: Train
) -> None:
    recipe, _ = stopped()
    for change, reason in CHANGES.items():
        with pytest.raises(ExitServeError, match=reason) as raised:
            train(recipe, "resume=true", change)
        assert "\n" not in str(raised.value)
