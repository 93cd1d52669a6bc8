"""Distillation from a model that does not change."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from exitserve.errors import ExitServeError
from exitserve_training.forward import ExitPass
from exitserve_training.objectives.aligned.objective import FrozenTeacher
from exitserve_training.objectives.aligned.options import KLToLastOptions

from ..passes import EXITS, NUM_LAYERS, random_ids, wrap


def test_every_exit_and_the_last_layer_learn_what_the_teacher_says(
    load: Callable[[str], Any], make_checkpoint: Callable[..., Path]
) -> None:
    """A teacher of another depth and width; the sum in plain torch."""
    path = make_checkpoint("llama", num_hidden_layers=3, hidden_size=64)
    model, ids = load("llama"), random_ids(2, 10)
    states = model(input_ids=ids, output_hidden_states=True).hidden_states
    normed = [model.model.norm(states[layer]) for layer in EXITS] + [states[NUM_LAYERS]]
    with torch.no_grad():
        taught = AutoModelForCausalLM.from_pretrained(path)(input_ids=ids).logits
    target = functional.log_softmax(taught[:, :-1].flatten(0, 1) / 2.0, -1)
    expected = torch.zeros(())
    for weight, rows in zip((2 / 12, 4 / 12, 6 / 12), normed, strict=True):
        logits = model.lm_head(rows)[:, :-1].flatten(0, 1) / 2.0
        found = functional.log_softmax(logits, -1)
        divergence = functional.kl_div(found, target, reduction="batchmean", log_target=True)
        expected = expected + weight * 4.0 * divergence
    wrapped = wrap(model, KLToLastOptions(teacher=str(path), temperature=2.0))
    loss, _ = model(input_ids=ids, exit_pass=ExitPass(0))
    torch.testing.assert_close(loss, expected)
    assert not list(wrapped.objectives.parameters()), "neither saved nor trained"
    assert not wrapped.objectives.state_dict()
    loss.backward()
    assert model.lm_head.weight.grad.abs().max() > 0
    teacher = wrapped.objectives.members[0].frozen.model
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_a_teacher_is_compiled_layer_by_layer(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda one: compiled.append(one) or one)
    path = str(make_checkpoint("llama", num_hidden_layers=3, hidden_size=64))
    layers = FrozenTeacher(path, compile_layers=True).parts.layers
    assert [one.__self__ for one in compiled] == list(layers)


def test_a_run_keeps_to_its_teacher_and_resumes(
    make_recipe: Callable[..., Path],
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
    train: Callable[..., int],
) -> None:
    model = str(make_checkpoint("llama", vocab_size=1024))
    keys: dict[str, Any] = {
        "config": None,
        "model": model,
        "tokenizer": {"train_bpe": {"vocab_size": 300}},
        "objectives": ["aligned", {"name": "kl_to_last", "teacher": "initial"}],
        "exit_layers": [2, 4],
    }
    recipe = make_recipe(**keys)
    assert train(recipe, "training.save_steps=2") == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["metrics"]["kl_to_last_loss"] > 0
    assert train(recipe, "resume=true", "training.max_steps=5") == 0
    other = str(make_checkpoint("llama"))
    again = ["overwrite=true"]
    with pytest.raises(ExitServeError, match="vocabulary of 128, the model one of 1024"):
        train(recipe, *again, f"objectives=[ce, {{name: kl_to_last, teacher: {other}}}]")
    with pytest.raises(ExitServeError, match="vocabulary of 128, the model one of 292"):
        train(make_recipe(objectives=[{"name": "kl_to_last", "teacher": other}]), *again)
    with pytest.raises(ExitServeError, match="this run is from scratch; give a directory"):
        train(make_recipe(objectives=keys["objectives"]), *again)
