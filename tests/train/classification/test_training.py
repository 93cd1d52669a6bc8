"""Classifiers trained with one classifier for all layers: what is learnt, kept and refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from exitserve.checkpoint.block import read_multi_exit
from exitserve.errors import ExitServeError
from exitserve_training.inspect.generation import sentence_embedder

Build = Callable[..., dict[str, Any]]
MakeRecipe = Callable[..., Path]
Train = Callable[..., int]


def test_every_layer_learns_to_say_the_class(text_model: Path, image_model: Path) -> None:
    for folder in (text_model, image_model):
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        assert report["says"] == "class"
        for depth in ("1", "2", "3"):
            # The task is one word, or one colour: even the first layer can tell.
            assert report["layers"][depth]["accuracy"] > 0.9, (folder, depth)
            assert report["layers"][depth]["loss"] < report["initial_layers"][depth]["loss"] / 2
        assert "| 1 of 3 " in (folder / "report.md").read_text(encoding="utf-8")
        card = (folder / "README.md").read_text(encoding="utf-8")
        assert "its classifier can also be read" in card and "CausalLM" not in card
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


def test_the_class_token_embeds_a_sentence_where_there_is_one(
    bundled: Path, text_model: Path
) -> None:
    for folder, pooled in ((text_model, lambda states: states[0]), (bundled, lambda s: s.mean(0))):
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
        inputs = tokenizer("a good film", return_tensors="pt")
        expected = pooled(model.eval()(**inputs).last_hidden_state[0].detach().float())
        found = sentence_embedder(str(folder))("a good film")
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # float32, other batches


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"objectives": ["simreg", "ce"]},
            "objective 'simreg' needs a sequence of tokens to predict",
        ),
        ({"exit_aware": {}}, "exit_aware is for language models, not for classifiers"),
        ({"lora": {}, "config": None, "model": "x"}, "lora is for language models"),
        (
            {"config": {"architecture": "vit"}},
            "a model of type 'vit' cannot be trained on data.format=labelled",
        ),
        ({"config": {"architecture": "llama"}}, "texts are classified by bert"),
    ],
)
def test_what_classifiers_cannot_have(
    change: dict[str, Any],
    message: str,
    make_recipe: MakeRecipe,
    reviews: Path,
    train: Train,
    of_texts: Build,
) -> None:
    with pytest.raises(ExitServeError, match=message):
        train(make_recipe(**of_texts(reviews, **change)))


def test_data_that_cannot_be_read(
    tmp_path: Path, make_recipe: MakeRecipe, train: Train, of_texts: Build, of_images: Build
) -> None:
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
    with pytest.raises(ExitServeError, match=r"cats/1.png' is not valid png"):
        train(make_recipe(**of_images(tmp_path)))


@pytest.mark.parametrize("kind", ["texts", "images"])
def test_a_resumed_run_makes_the_same_steps(
    kind: str,
    resumes: Callable[..., None],
    reviews: Path,
    images: Path,
    of_texts: Build,
    of_images: Build,
) -> None:
    tree = of_texts(reviews) if kind == "texts" else of_images(images)
    if kind == "images":
        tree["config"] = {**tree["config"], "architecture": "deit"}
    del tree["training"]
    tree["objectives"] = ["aligned", "simcse"]
    resumes(**{**tree, "data": {**tree["data"], "max_rows": 24}})
