"""Inspections of checkpoints whose answers are known, and on every kind of model."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from exitserve.cli import run
from exitserve_training.inspect.command import build_parser
from exitserve_training.inspect.data import InspectionSettings
from exitserve_training.inspect.generation import cut_to
from exitserve_training.inspect.inspection import inspect
from exitserve_training.losses import mean_cosine, simreg

MakeCheckpoint = Callable[..., Path]

PICTURES = ("accuracy", "loss", "similarity", "cosine_with_last", "condensation", "effective_rank")
ROWS, LENGTH = 6, 32


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("book") / "book.txt"
    lines = [f"def function_{n}(value):\n    return value * {n % 7} + {n}\n" for n in range(200)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def look(model: Path, book: Path, **keys: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"rows": ROWS, "length": LENGTH, "samples": 150, "batch_size": 4}
    found = inspect(InspectionSettings(model=str(model), data=[str(book)], **(usual | keys)))
    return found.report


def test_layers_that_do_nothing_are_all_alike(make_checkpoint: MakeCheckpoint, book: Path) -> None:
    folder = make_checkpoint("llama", vocab_size=512, num_hidden_layers=3, exits=(1,))
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    idle = folder.parent / f"{folder.name}-idle"
    model.save_pretrained(idle)
    AutoTokenizer.from_pretrained(folder).save_pretrained(idle)
    report = look(idle, book)
    ones = torch.ones(3, 3)
    for name in ("cos", "cka"):
        torch.testing.assert_close(torch.tensor(report[name]), ones, rtol=1e-5, atol=1e-6)
    first, *others = report["layers"].values()
    assert all(layer == first for layer in others), "every instrument says the same of each depth"
    assert report["condensation"]["spearman"] == report["condensation"]["kendall"] == 0.0
    assert set(report["minimal_depth"].values()) == {1}
    for quartiles in report["cosine_with_last"].values():
        assert quartiles == pytest.approx([1.0] * 5, abs=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_quality_is_that_of_the_model_cut_there(
    family: str, make_checkpoint: MakeCheckpoint, book: Path
) -> None:
    folder = make_checkpoint(family, vocab_size=512)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    # All whole sequences of the text, so that the draw does not matter.
    ids = torch.tensor(tokenizer(book.read_text())["input_ids"])
    ids = ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)
    report = look(folder, book, rows=10_000)
    assert report["rows"] == len(ids)
    for depth in (1, 4, 6):
        with cut_to(model, depth), torch.no_grad():
            said = model(ids, output_hidden_states=True)
        logits, labels = said.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        found = report["layers"][str(depth)]
        own = functional.one_hot(labels, 512).bool()
        margin = logits[own] - logits.masked_fill(own, -math.inf).amax(-1)
        assert found["margin"] == pytest.approx(float(margin.mean()), abs=1e-4)
        normed = said.hidden_states[-1]
        assert found["normed_cosine"] == pytest.approx(float(mean_cosine(normed)), abs=1e-5)
        likeness = float(simreg(normed[:, :-1], ids[:, 1:]))
        assert found["contrastive_similarity"] == pytest.approx(likeness, rel=1e-3)
        assert found["loss"] == pytest.approx(float(functional.cross_entropy(logits, labels)), 1e-4)
        assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
        right = (logits.argmax(-1) == labels).float().mean()
        assert found["accuracy"] == pytest.approx(float(right), abs=1e-3)
    with torch.no_grad():  # and the model is whole again
        whole = model(ids).logits[:, :-1].flatten(0, 1)
    assert torch.equal(whole, logits)


def test_writes_json_page_and_pictures(
    bundled: Path, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = [str(bundled), "--data", str(book), "--rows", "8", "--out", str(out)]
    command += ["--sequence-length", "64", "--prompts", "2", "--new-tokens", "12"]
    command += ["--dtype", "bfloat16"]
    assert run(build_parser(), [*command, "--sentence-model", str(bundled)]) == 0
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["schema_version"] == 1
    assert report["exit_layers"] == [6, 12, 18]
    assert report["dtype"] == "bfloat16"
    exact = look(bundled, book, rows=8, length=64)["layers"]
    for depth, layer in report["layers"].items():
        assert 0 < abs(layer["loss"] / exact[depth]["loss"] - 1) < 0.03  # 8 bits of precision
    assert list(report["texts"]["diversity"]) == ["6", "12", "18", "24"]
    assert report["texts"]["prompts"] == 2, "one long text begins more than once"
    assert all(-1.0 <= value <= 1.0 for value in report["texts"]["coherence"].values())
    # What the model was trained for: exits at which the head reads well.
    losses = [report["layers"][str(depth)]["loss"] for depth in (6, 12, 18, 24)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] < report["layers"]["1"]["loss"] - 0.5
    for name in PICTURES:
        assert (out / f"{name}.png").stat().st_size > 10_000
        assert f"![{name}]({name}.png)" in (out / "report.md").read_text(encoding="utf-8")
    shown = capsys.readouterr().out
    assert "6*" in shown
    assert "Of the last layer's accuracy" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "--rows must be at least 1, not 0"),
        (["--sequence-length", "1"], "--sequence-length must be at least 2, not 1"),
        (["--sequence-length", "4096"], "longer than the model's context of 512"),
        (["--sentence-model", "x"], "give --prompts"),
        (["--label-field", "x"], "data.label_field has no effect with data.format=text"),
        (["--data", "nothing.txt"], "no data file matches 'nothing.txt'"),
        (["--prompts", "1", "--prompt-tokens", "9999"], "no text of the data is 9999 tokens long"),
        (["--prompts", "1", "--sentence-model", "nowhere"], "no sentence model could be loaded"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str],
    message: str,
    bundled: Path,
    book: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [str(bundled), "--data", str(book), "--rows", "2"]
    assert run(build_parser(), [*command, "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
