"""Numbers in place of classes (STS-B): squared error at every exit, scored by correlations."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from exitserve.cli import main
from exitserve.errors import ExitServeError
from exitserve_training.losses import weighted_layer_squares
from exitserve_training.recipe import parse_recipe

Build = Callable[..., dict[str, Any]]
Trained = Callable[[Path, dict[str, Any]], Path]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sentences and a score of 0 to 5, which one word of the second decides."""
    path = tmp_path_factory.mktemp("pairs") / "sts.tsv"
    draw = random.Random(0)
    lines = ["sentence1\tsentence2\tscore"]
    for number in range(400):
        score = draw.randint(0, 5)
        word = ["other", "unlike", "close", "similar", "alike", "same"][score]
        lines.append(f"a film {number}\tthe {word} film\t{score}.0")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def regression(
    tmp_path_factory: pytest.TempPathFactory, pairs: Path, of_texts: Build, trained: Trained
) -> Path:
    tree = of_texts(pairs)
    tree["data"] |= {"text_field": "sentence1", "pair_field": "sentence2"}
    tree["data"] |= {"label_field": "score", "labels": "numbers"}
    tree["training"] = {**tree["training"], "max_steps": 150}
    return trained(tmp_path_factory.mktemp("sts"), tree)


def test_the_numbers_are_learnt(regression: Path) -> None:
    report = json.loads((regression / "report.json").read_text(encoding="utf-8"))
    for layer in ("1", "2", "3"):
        # Scores are uniform over 0 to 5, whose variance is 2.9: what one number for all leaves.
        below = 5.0 if layer == "1" else 1.0
        assert report["layers"][layer]["loss"] < below < report["initial_layers"][layer]["loss"]
        assert report["layers"][layer]["accuracy"] is report["layers"][layer]["perplexity"] is None
    assert "mean squared error" in (regression / "report.md").read_text(encoding="utf-8")
    config = json.loads((regression / "config.json").read_text(encoding="utf-8"))
    assert config["id2label"] == {"0": "number"}


def test_classify_scores_each_depth_and_predicts_what_transformers_does(
    regression: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["classify", str(regression), "--data", str(pairs), "--text-field", "sentence1"]
    command += ["--pair-field", "sentence2", "--label-field", "score", "--batch-size", "64"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    assert "Spearman" in capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert all(report["layers"][layer]["pearson"] > 0.8 for layer in ("2", "3"))
    rows = (tmp_path / "out" / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    lines = [line.split("\t") for line in pairs.read_text(encoding="utf-8").splitlines()[1:]]
    model = AutoModelForSequenceClassification.from_pretrained(regression)
    tokenizer = AutoTokenizer.from_pretrained(regression)
    first, second, known = zip(*lines, strict=True)
    with torch.no_grad():
        inputs = tokenizer(list(first), list(second), padding=True, return_tensors="pt")
        expected = model(**inputs).logits[:, 0].numpy()
    found = [json.loads(row)["number"] for row in rows]
    np.testing.assert_allclose(found, expected, atol=2e-4)
    numbers = np.asarray(known, dtype=np.float64)
    spearman = stats.spearmanr(expected, numbers).statistic
    assert report["layers"]["3"]["spearman"] == pytest.approx(spearman, abs=1e-3)
    assert main([*command, "--exit-threshold", "0.9", "--out", str(tmp_path / "other")]) == 2
    assert "has no confidence to stop by" in capsys.readouterr().err


def test_the_loss_is_the_weighted_sum_of_squares() -> None:
    generator = torch.Generator().manual_seed(0)
    states = {layer: torch.randn(4, 1, 3, generator=generator) for layer in (1, 2)}
    labels = torch.tensor([[0.0], [1.0], [2.5], [5.0]])
    reader = torch.nn.Linear(3, 1)
    loss, means = weighted_layer_squares(states, reader, labels, {1: 0.25, 2: 0.75})
    for layer, mean in means.items():
        torch.testing.assert_close(mean, ((reader(states[layer])[:, 0] - labels) ** 2).mean())
    torch.testing.assert_close(loss, 0.25 * means[1] + 0.75 * means[2])
    with pytest.raises(ExitServeError, match="the head has 2 outputs"):
        weighted_layer_squares(states, torch.nn.Linear(3, 2), labels, {1: 1.0, 2: 1.0})


@pytest.mark.parametrize(
    "objective",
    ["kl_to_last", {"name": "ce", "balanced": True}, {"name": "separate_classifiers", "kl": 1.0}],
)
def test_objectives_of_classes_are_refused(objective: Any) -> None:
    main_one = [] if isinstance(objective, dict) else ["aligned"]
    data = {"format": "labelled", "files": ["x.tsv"], "labels": "numbers"}
    tree = {"output_dir": "x", "model": "x", "data": data, "objectives": [*main_one, objective]}
    with pytest.raises(ExitServeError, match=r"needs classes to predict.*aligned, ce, cosine"):
        parse_recipe(tree)
