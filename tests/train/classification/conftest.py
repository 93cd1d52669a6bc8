"""Small classifiers of texts and of images, and what they are trained on."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from ...shapes import BERT

Train = Callable[..., int]
Build = Callable[..., dict[str, Any]]
Trained = Callable[[Path, dict[str, Any]], Path]

COLOURS = {"red": (230, 40, 40), "green": (40, 230, 40), "blue": (40, 40, 230)}
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


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of data sets."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def of_texts() -> Build:
    """A recipe for texts with classes."""

    def build(reviews: Path, **keys: Any) -> dict[str, Any]:
        data = {"format": "labelled", "files": [str(reviews)], "text_field": "sentence"}
        data |= {"validation_fraction": 0.2, "sequence_length": 32}
        config = {**BERT, "max_position_embeddings": 32}
        return {"config": config, "data": data, "training": TRAINING, "exit_layers": [1, 2], **keys}

    return build


@pytest.fixture(scope="session")
def of_images() -> Build:
    """A recipe for images with classes."""

    def build(images: Path, **keys: Any) -> dict[str, Any]:
        data = {"format": "images", "files": [str(images)], "validation_fraction": 0.2}
        tree = {"config": VIT, "data": data, "training": TRAINING, "exit_layers": [1, 2]}
        return {**tree, "tokenizer": None, **keys}

    return build


@pytest.fixture(scope="session")
def trained(train: Train) -> Callable[[Path, dict[str, Any]], Path]:
    """Trains as a recipe says, in a folder of the test's."""

    def make(folder: Path, tree: dict[str, Any]) -> Path:
        recipe = folder / "recipe.yaml"
        usual = {"output_dir": str(folder / "out"), "tokenizer": {"train_bpe": {"vocab_size": 300}}}
        # JSON is YAML.
        tree = {key: value for key, value in {**usual, **tree}.items() if value is not None}
        recipe.write_text(json.dumps(tree), encoding="utf-8")
        assert train(recipe) == 0
        return folder / "out"

    return make


@pytest.fixture(scope="session")
def text_model(
    tmp_path_factory: pytest.TempPathFactory, reviews: Path, of_texts: Build, trained: Trained
) -> Path:
    """A classifier of texts with exits."""
    return trained(tmp_path_factory.mktemp("bert"), of_texts(reviews))


@pytest.fixture(scope="session")
def image_model(
    tmp_path_factory: pytest.TempPathFactory, images: Path, of_images: Build, trained: Trained
) -> Path:
    """A classifier of images with exits."""
    return trained(tmp_path_factory.mktemp("vit"), of_images(images))
