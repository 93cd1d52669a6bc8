"""Classifiers: trained with one classifier for all layers, and run with early exit."""

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from exitserve.checkpoint import read_multi_exit
from exitserve.cli import main
from exitserve.errors import ExitServeError
from exitserve_training.classification.early_exit import EarlyExitClassifier
from exitserve_training.classification.inputs import encoder
from exitserve_training.classification.labelled import (
    Examples,
    load_split_examples,
)
from exitserve_training.classification.run import own_classifiers
from exitserve_training.data_recipe import DataRecipe
from exitserve_training.models import load_model
from exitserve_training.parts import model_parts

MakeRecipe = Callable[..., Path]
Train = Callable[..., int]

COLOURS = {"red": (230, 40, 40), "green": (40, 230, 40), "blue": (40, 40, 230)}
BERT = {
    "architecture": "bert",
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
VIT = {
    "architecture": "vit",
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
TRAINING = {
    "max_steps": 80,
    "per_device_train_batch_size": 16,
    "learning_rate": 3e-3,
    "logging_steps": 20,
    "disable_tqdm": True,
}


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of unequal length whose class is decided by one word."""
    path = tmp_path_factory.mktemp("texts") / "reviews.tsv"
    draw = random.Random(0)
    lines = ["sentence\tlabel"]
    for number in range(600):
        good = draw.random() < 0.5
        words = draw.choices(
            ["a", "the", "film", "story", 'said "so', "plot"], k=draw.randint(1, 8)
        )
        words.insert(draw.randint(0, len(words)), "good" if good else "bad")
        lines.append(f"{' '.join(words)} {number}\t{int(good)}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noisy images of three colours, larger than the model's."""
    folder = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (folder / name).mkdir()
        for number in range(60):
            noise = draw.integers(-40, 40, (12, 12, 3))
            pixels = np.clip(np.asarray(colour) + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def of_texts(reviews: Path, **keys: Any) -> dict[str, Any]:
    data = {"format": "labelled", "files": [str(reviews)], "text_field": "sentence"}
    data |= {"validation_fraction": 0.2, "sequence_length": 32}
    return {"config": BERT, "data": data, "training": TRAINING, "exit_layers": [1, 2], **keys}


def of_images(images: Path, **keys: Any) -> dict[str, Any]:
    data = {"format": "images", "files": [str(images)], "validation_fraction": 0.2}
    return {
        "config": VIT,
        "data": data,
        "training": TRAINING,
        "exit_layers": [1, 2],
        "tokenizer": None,
        **keys,
    }


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory, reviews: Path, train: Train) -> Path:
    return trained(tmp_path_factory.mktemp("bert"), train, of_texts(reviews))


@pytest.fixture(scope="module")
def image_model(tmp_path_factory: pytest.TempPathFactory, images: Path, train: Train) -> Path:
    return trained(tmp_path_factory.mktemp("vit"), train, of_images(images))


def trained(folder: Path, train: Train, tree: dict[str, Any]) -> Path:
    recipe = folder / "recipe.yaml"
    usual = {"output_dir": str(folder / "out"), "tokenizer": {"train_bpe": {"vocab_size": 300}}}
    # JSON is YAML.
    tree = {key: value for key, value in {**usual, **tree}.items() if value is not None}
    recipe.write_text(json.dumps(tree), encoding="utf-8")
    assert train(recipe) == 0
    return folder / "out"


def test_every_layer_learns_to_say_the_class(text_model: Path, image_model: Path) -> None:
    for folder in (text_model, image_model):
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        assert report["says"] == "class"
        for depth in ("1", "2", "3"):
            # The task is one word, or one colour: even the first layer can tell.
            assert report["layers"][depth]["accuracy"] > 0.9, (folder, depth)
            assert report["layers"][depth]["loss"] < report["initial_layers"][depth]["loss"] / 2
        assert "| 1 of 3 |" in (folder / "report.md").read_text(encoding="utf-8")
        block = read_multi_exit(folder)
        assert block is not None
        assert block.exit_layers == (1, 2)


def test_checkpoints_are_ordinary_ones(text_model: Path, image_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(text_model)
    model = AutoModelForSequenceClassification.from_pretrained(text_model)
    logits = model(**tokenizer(["a good film", "the bad plot"], padding=True, return_tensors="pt"))
    assert [model.config.id2label[int(i)] for i in logits.logits.argmax(-1)] == ["1", "0"]
    vision = AutoModelForImageClassification.from_pretrained(image_model)
    assert vision.config.label2id == {"blue": 0, "green": 1, "red": 2}
    assert json.loads((image_model / "preprocessor_config.json").read_text())["size"] == {
        "height": 8,
        "width": 8,
    }


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
    command = ["classify", str(text_model), "--data", str(reviews), "--text-field", "sentence"]
    command += ["--exit-threshold", "0.9,1", "--batch-size", "50", "--repeats", "2"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    early, never = report["thresholds"]
    assert sum(early["exits"].values()) == report["inputs"] == 600
    assert early["accuracy"] > 0.9
    assert never["depth_speedup"] == 1.0
    assert never["agreement"] == 1.0
    assert never["accuracy"] == report["full_accuracy"]
    layers = sum(int(layer) * count for layer, count in early["exits"].items())
    assert early["depth_speedup"] == pytest.approx(3 * 600 / layers)
    rows = (tmp_path / "out" / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    sentences = [line.split("\t")[0] for line in reviews.read_text().splitlines()[1:]]
    predictions = [json.loads(row) for row in rows]
    assert [row["input"] for row in predictions] == sentences, "in the order of the file"
    assert sum(row["depth"] for row in predictions) == layers
    assert "wall speedup" in capsys.readouterr().out
    assert (tmp_path / "out" / "exits.png").stat().st_size > 10_000


def test_balanced_cross_entropy_finds_the_rare_class(tmp_path: Path, train: Train) -> None:
    rare = tmp_path / "rare.tsv"
    draw = random.Random(3)
    rows = []
    for number in range(400):
        is_rare = number % 20 == 0
        # The word tells the class in four of five rows: enough for one in twenty to be given up.
        word = "odd" if (is_rare and draw.random() < 0.8) or draw.random() < 0.1 else "even"
        rows.append(f"{word} number {draw.randint(0, 99)}\t{'rare' if is_rare else 'usual'}")
    rare.write_text("\n".join(["sentence\tlabel", *rows]), encoding="utf-8")
    found = {}
    for balanced in (False, True):
        tree = of_texts(rare, objectives=[{"name": "ce", "balanced": balanced}], exit_layers=[1])
        (tmp_path / str(balanced)).mkdir()
        folder = trained(tmp_path / str(balanced), train, tree)
        model = load_model(str(folder), "class")
        model.train(False)
        inputs = encoder(str(folder), model.config)(
            Examples([("odd number 7", None), ("even number 7", None)], ["", ""])
        )
        said = EarlyExitClassifier(model, [])(inputs, 1.0).classes.tolist()
        found[balanced] = [model.config.id2label[one] for one in said]
    assert found == {False: ["usual", "usual"], True: ["rare", "usual"]}


def test_exits_with_classifiers_of_their_own(reviews: Path, tmp_path: Path, train: Train) -> None:
    tree = of_texts(reviews, objectives=["separate_classifiers"])
    folder = trained(tmp_path, train, tree)
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    model = load_model(str(folder), "class")
    own = own_classifiers(str(folder), model_parts(model))
    assert sorted(own) == [1, 2]
    # At a threshold of 0 all leave at the first exit: the accuracy is that of its classifier.
    held_out = load_split_examples(
        DataRecipe(
            format="labelled",
            files=[str(reviews)],
            text_field="sentence",
            validation_fraction=0.2,
        ),
        0,
    )[1]
    model.train(False)
    encode = encoder(str(folder), model.config)
    numbers = [int(name) for name in held_out.classes]
    for layer in (1, 2):
        said = EarlyExitClassifier(model, [layer], own)(encode(held_out), 0.0)
        accuracy = sum(a == b for a, b in zip(said.classes.tolist(), numbers, strict=True))
        expected = report["layers"][str(layer)]["accuracy"]
        assert accuracy / len(numbers) == pytest.approx(expected, abs=1e-6)
        assert set(said.depth.tolist()) == {layer}


def test_classify_without_classes(text_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "new.jsonl"
    file.write_text('{"text": "a good film"}\n{"text": "bad"}\n', encoding="utf-8")
    command = ["classify", str(text_model), "--data", str(file), "--repeats", "1"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["full_accuracy"] is None
    rows = (tmp_path / "out" / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(row)["class"] for row in rows] == ["1", "0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--exit-threshold", "1.5"], "--exit-threshold 1.5 is not between 0 and 1"),
        (["--exit-threshold", "high"], "must be numbers with commas between"),
        (["--exit-layers", "3"], "exit layer 3 is out of range; choose from 1..2"),
        (["--batch-size", "0"], "--batch-size 0 must be at least 1"),
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
    command = ["classify", str(text_model), "--data", str(reviews), "--text-field", "sentence"]
    assert main([*command, "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_classifiers_can_be_inspected(text_model: Path, reviews: Path, tmp_path: Path) -> None:
    command = ["inspect", str(text_model), "--data", str(reviews), "--text-field", "sentence"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    last = report["layers"]["3"]
    # Trained until one word decides: the states of a class have collapsed, and lines part them.
    assert last["accuracy"] > 0.9
    assert last["probe_accuracy"] > 0.9
    assert last["nc1"] < 0.5


def test_language_models_do_not_classify(
    bundled: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["classify", str(bundled), "--data", str(reviews), "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert "is a LlamaForCausalLM, not a classifier" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objectives": ["simreg", "ce"]}, "objective 'simreg' is about the tokens of a sequence"),
        ({"exit_aware": {}}, "exit_aware is for language models, not for classifiers"),
        ({"lora": {}, "config": None, "model": "x"}, "lora is for language models"),
        ({"config": VIT}, "a model of type 'vit' cannot be trained on data.format=labelled"),
        ({"config": {**BERT, "architecture": "llama"}}, "texts are classified by bert"),
    ],
)
def test_what_classifiers_cannot_have(
    change: dict[str, Any], message: str, make_recipe: MakeRecipe, reviews: Path, train: Train
) -> None:
    with pytest.raises(ExitServeError, match=message):
        train(make_recipe(**of_texts(reviews, **change)))


def test_data_that_cannot_be_read(tmp_path: Path, make_recipe: MakeRecipe, train: Train) -> None:
    one_class = tmp_path / "one.tsv"
    one_class.write_text("sentence\tlabel\na\t1\nb\t1\nc\t1\n")
    with pytest.raises(ExitServeError, match="all rows have the class '1'"):
        train(make_recipe(**of_texts(one_class)))
    gap = tmp_path / "gap.tsv"
    gap.write_text("sentence\tlabel\na\t1\nb\t\n")
    with pytest.raises(ExitServeError, match=r"gap.tsv', row 2: its text or its class is missing"):
        train(make_recipe(**of_texts(gap)))
    (tmp_path / "cats").mkdir()
    with pytest.raises(ExitServeError, match="has no images in folders of their classes"):
        train(make_recipe(**of_images(tmp_path)))
    (tmp_path / "cats" / "1.png").write_text("no image")
    (tmp_path / "dogs").mkdir()
    for number in range(9):
        Image.new("RGB", (8, 8)).save(tmp_path / "dogs" / f"{number}.png")
        Image.new("RGB", (8, 8)).save(tmp_path / "cats" / f"1{number}.png")
    with pytest.raises(ExitServeError, match=r"cats/1.png' is no image that can be read"):
        train(make_recipe(**of_images(tmp_path)))


@pytest.mark.parametrize("kind", ["texts", "images"])
def test_a_resumed_run_makes_the_same_steps(
    kind: str, make_recipe: MakeRecipe, reviews: Path, images: Path, train: Train, tmp_path: Path
) -> None:
    steps = {**TRAINING, "max_steps": 7, "save_steps": 3, "save_total_limit": 5}
    tree = of_texts(reviews) if kind == "texts" else of_images(images)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        assert train(make_recipe(**{**tree, "output_dir": str(folder), "training": steps})) == 0
    for checkpoint in parts.glob("checkpoint-*"):
        if checkpoint.name != "checkpoint-3":
            for file in checkpoint.iterdir():
                file.unlink()
            checkpoint.rmdir()
    recipe = make_recipe(**{**tree, "output_dir": str(parts), "training": steps})
    assert train(recipe, "resume=true") == 0
    mine, truth = (load_file(folder / "model.safetensors") for folder in (parts, whole))
    assert mine.keys() == truth.keys()
    assert all(torch.equal(mine[name], truth[name]) for name in truth)


def test_the_best_checkpoint_is_taken_back(
    images: Path, make_recipe: MakeRecipe, train: Train, tmp_path: Path
) -> None:
    steps = {**TRAINING, "max_steps": 6, "save_steps": 2, "eval_steps": 2, "save_total_limit": 5}
    # The loss falls, so that the greatest is not the last.
    steps |= {"eval_strategy": "steps", "load_best_model_at_end": True, "greater_is_better": True}
    recipe = make_recipe(**of_images(images, training=steps, output_dir=str(tmp_path / "out")))
    assert train(recipe) == 0
    state = json.loads((tmp_path / "out" / "checkpoint-6" / "trainer_state.json").read_text())
    best = Path(state["best_model_checkpoint"])
    assert best.name != "checkpoint-6"
    mine, truth = (load_file(one / "model.safetensors") for one in (tmp_path / "out", best))
    assert all(torch.equal(mine[name], truth[name]) for name in truth)


def test_another_task_begins_with_a_new_classifier(
    text_model: Path, reviews: Path, tmp_path: Path, train: Train
) -> None:
    other = tmp_path / "three.tsv"
    rows = reviews.read_text().splitlines()[1:100]
    kinds = [f"{row.split(chr(9))[0]}\t{'abc'[n % 3]}" for n, row in enumerate(rows)]
    other.write_text("\n".join(["sentence\tlabel", *kinds]), encoding="utf-8")
    tree = of_texts(other, config=None, model=str(text_model), tokenizer=None)
    folder = trained(tmp_path, train, {**tree, "training": {**TRAINING, "max_steps": 1}})
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert list(model.config.id2label.values()) == ["a", "b", "c"]
