"""Classifiers run with early exit: rows that are sure leave, and the command that does it."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoTokenizer

from exitserve.cli import run
from exitserve_training.classification.command import build_parser
from exitserve_training.classification.early_exit import EarlyExitClassifier
from exitserve_training.inspect.command import build_parser as inspection_parser
from exitserve_training.models import load_model


def one_by_one(
    model: Any, inputs: dict[str, torch.Tensor], threshold: float
) -> list[tuple[int, int]]:
    """(class, depth) of each row, run alone, from transformers' own hidden states."""
    found = []
    for row in range(len(next(iter(inputs.values())))):
        alone = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
        if "attention_mask" in alone:  # no padding
            kept = alone["attention_mask"][0].bool()
            alone = {name: tensor[:, kept] for name, tensor in alone.items()}
        with torch.no_grad():
            states = model(**alone, output_hidden_states=True).hidden_states
        for depth in (1, 2, 3):
            state = states[depth][:, 0]
            if model.config.model_type == "vit":
                logits = model.classifier(model.vit.layernorm(state))
            else:
                pooled = model.bert.pooler.activation(model.bert.pooler.dense(state))
                logits = model.classifier(pooled)
            best = logits[0].softmax(-1).max(-1)
            if depth == 3 or best.values > threshold:
                found.append((int(best.indices), depth))
                break
    return found


@pytest.mark.parametrize("kind", ["texts", "images"])
def test_early_exit_is_each_row_alone(kind: str, text_model: Path, image_model: Path) -> None:
    folder = text_model if kind == "texts" else image_model
    model: Any = load_model(str(folder), "class").eval()
    if kind == "texts":
        tokenizer = AutoTokenizer.from_pretrained(folder)
        texts = ["good", "the film was bad, they said, and the plot", "a story", "plot good plot"]
        inputs = dict(tokenizer(texts * 2, padding=True, return_tensors="pt"))
    else:
        inputs = {"pixel_values": torch.randn(8, 3, 8, 8, generator=torch.manual_seed(0))}
    runner = EarlyExitClassifier(model, [1, 2])
    # Thresholds that tell the rows apart, none of them within rounding of a confidence.
    sure = [EarlyExitClassifier(model, [layer])(inputs, 0.0).confidence for layer in (1, 2)]
    steps = sorted({round(value, 4) for value in torch.cat(sure).tolist()})
    between = [(low + high) / 2 for low, high in pairwise(steps) if high - low > 1e-3]
    depths = set()
    for threshold in (0.0, *between, 1.0):
        said = runner(inputs, threshold)
        pairs = list(zip(said.classes.tolist(), said.depth.tolist(), strict=True))
        assert pairs == one_by_one(model, inputs, threshold)
        depths |= set(said.depth.tolist())
    assert len(depths) == 3, "thresholds that show nothing"
    with torch.no_grad():
        full = model(**inputs).logits.softmax(-1).max(-1)
    never = runner(inputs, 1.0)
    torch.testing.assert_close(never.confidence, full.values, rtol=1e-5, atol=1e-6)
    assert never.classes.tolist() == full.indices.tolist()


def test_classify_reports_and_predicts(
    text_model: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = datasets.Dataset.from_csv(str(reviews), delimiter="\t", quoting=3)
    table.to_json(tmp_path / "set" / "validation.jsonl")
    data = ["--data", f"dataset={tmp_path / 'set'}", "split=validation", "--text-field", "sentence"]
    command = [str(text_model), *data]
    command += ["--exit-threshold", "0.9,1", "--batch-size", "50", "--repeats", "2"]
    assert run(build_parser(), [*command, "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    early, never = report["thresholds"]
    assert sum(early["exits"].values()) == report["inputs"] == 600
    assert min(early[score] for score in ("accuracy", "f1", "matthews")) > 0.8
    assert never["depth_speedup"] == never["agreement"] == 1.0
    assert never["accuracy"] == report["full_accuracy"]
    layers = sum(int(layer) * count for layer, count in early["exits"].items())
    assert early["depth_speedup"] == pytest.approx(3 * 600 / layers)
    rows = (tmp_path / "out" / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    sentences = [line.split("\t")[0] for line in reviews.read_text().splitlines()[1:]]
    predictions = [json.loads(row) for row in rows]
    assert [row["input"] for row in predictions] == sentences, "in the order of the file"
    assert sum(row["depth"] for row in predictions) == layers
    printed = capsys.readouterr().out
    assert "Mat-" in printed and "…" not in printed, "tables fit 80 columns"
    looked = [str(text_model), *data, "--rows", "600", "--out", str(tmp_path / "inspected")]
    assert run(inspection_parser(), looked) == 0
    inspected = json.loads((tmp_path / "inspected" / "report.json").read_text(encoding="utf-8"))
    assert inspected["rows"] == 600
    assert inspected["layers"]["3"]["accuracy"] == pytest.approx(report["full_accuracy"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--exit-threshold", "1.5"], "--exit-threshold 1.5 is not between 0 and 1"),
        (["--exit-threshold", "high"], "must be numbers separated by commas"),
        (["--exit-layers", "3"], "exit layer 3 is out of range; choose from 1..2"),
        (["--batch-size", "0"], "--batch-size must be at least 1, not 0"),
        (["--text-field", "tex"], "has no column 'tex'; it has: sentence, label"),
        (["--label-field", "sentence"], ", which is none of 0, 1. Check the label field."),
        (["--data", "nothing.tsv"], "no data file matches 'nothing.tsv'"),
    ],
)
def test_classify_names_mistakes(
    arguments: list[str],
    message: str,
    text_model: Path,
    reviews: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [str(text_model), "--data", str(reviews), "--text-field", "sentence"]
    assert run(build_parser(), [*command, "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
