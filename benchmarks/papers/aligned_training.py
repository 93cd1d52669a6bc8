"""The aligned-training paper's claims, on small models trained here.

    python benchmarks/papers/aligned_training.py texts --data NOVELS/*.txt
    python benchmarks/papers/aligned_training.py writing --data NOVELS/*.txt
    python benchmarks/papers/aligned_training.py sentences --data SST-2 (train.tsv, test.tsv)
    python benchmarks/papers/aligned_training.py images --data CIFAR10 (train/, test/)
    python benchmarks/papers/aligned_training.py transfer --data CIFAR10 (train/, test/)
    python benchmarks/papers/aligned_training.py residuals --data CIFAR10 (train/, test/)

Each is a study of its own with three seeds a variant; results go to docs/papers/results.
"""

from __future__ import annotations

import atexit
import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measures
from study import Run, Study, seeds_of, study_command, train_quietly

THRESHOLDS = (0.6, 0.7, 0.8, 0.9, 0.95)
OF_IMAGES = (0.3, 0.4, 0.5, 0.6, 0.7)
"""Fewer are sure among ten classes."""
ANIMALS = ("bird", "cat", "deer", "dog", "frog", "horse")
VEHICLES = ("airplane", "automobile", "ship", "truck")

OBJECTIVES: dict[str, list[Any]] = {
    "plain": ["ce"],
    "aligned": [{"name": "aligned", "layers": "all"}],
    "aligned, no alternation": [{"name": "aligned", "layers": "all", "alternate": False}],
    "cosine-regularised": ["ce", "cosine_alignment"],
    "separate classifiers": [{"name": "separate_classifiers", "layers": "all"}],
    "separate classifiers, alternating": [
        {"name": "separate_classifiers", "layers": "all", "alternate": True}
    ],
}
"""The paper's own method, what it alternates with, and what it is compared with."""
SEPARATE = ("separate classifiers", "separate classifiers, alternating")


def texts(data: list[str]) -> Study:
    """Decoders from scratch on novels: quality, similarity, depth; figures 2, 4, 8, 13."""
    recipe = _decoder(data)

    def measure(folder: Path) -> dict[str, Any]:
        return {**measures.quality(folder), **measures.look(folder, data[-1:])}

    variants = {name: {**recipe, "objectives": these} for name, these in OBJECTIVES.items()}
    for depth in (2, 4):
        config = {**recipe["config"], "num_hidden_layers": depth}
        variants[f"plain, {depth} layers"] = {**recipe, "config": config, "objectives": ["ce"]}
    return _study("aligned-texts", variants, measure)


def writing(data: list[str]) -> Study:
    """What plain and aligned decoders write at each depth; figure 8 (c) and (d)."""
    recipe = _decoder(data)

    def measure(folder: Path) -> dict[str, Any]:
        return {**measures.quality(folder), **measures.writing(folder, data[-1:], reader())}

    @functools.cache
    def reader() -> Path:
        """The sentence model: no published one is at hand, so a masked BERT of the same novels."""
        home = tempfile.TemporaryDirectory(prefix="reader-")
        atexit.register(home.cleanup)
        config = {
            "architecture": "bert",
            "num_hidden_layers": 2,
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
        }
        masked = {**recipe, "config": config, "objectives": ["ce"], "exit_layers": []}
        return train_quietly(masked, Path(home.name) / "reader", 0, max_steps=800)

    variants = {name: {**recipe, "objectives": OBJECTIVES[name]} for name in ("plain", "aligned")}
    return _study("aligned-writing", variants, measure)


def _decoder(data: list[str]) -> dict[str, Any]:
    return {
        "config": {
            "architecture": "llama",
            "num_hidden_layers": 6,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
        },
        "tokenizer": {"train_bpe": {"vocab_size": 2048}},
        "data": {
            "files": data[:-2],
            "validation_files": data[-2:],
            "max_bytes": 4_000_000,
            "sequence_length": 128,
            "validation_blocks": 128,
        },
        "exit_layers": "all",
        "training": {
            "max_steps": 700,
            "per_device_train_batch_size": 8,
            "per_device_eval_batch_size": 16,
            "learning_rate": 2.0e-3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 50,
            "weight_decay": 0.1,
        },
    }


def sentences(data: list[str]) -> Study:
    """BERT-shaped classifiers of SST-2 from scratch; figures 3, 5 and 7."""
    folder = Path(data[0])
    test = [str(folder / "test.tsv")]
    fields = {"text_field": "sentence"}
    recipe: dict[str, Any] = {
        "config": {
            "architecture": "bert",
            "num_hidden_layers": 6,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
        },
        "tokenizer": {"train_bpe": {"vocab_size": 4096}},
        "data": {
            "format": "labelled",
            "files": [str(folder / "train.tsv")],
            "validation_files": test,
            "sequence_length": 64,
            **fields,
        },
        "exit_layers": "all",
        "training": {
            "max_steps": 1500,
            "per_device_train_batch_size": 32,
            "per_device_eval_batch_size": 64,
            "learning_rate": 5.0e-4,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 100,
        },
    }

    def measure(folder: Path) -> dict[str, Any]:
        return {
            **measures.quality(folder),
            **measures.look(folder, test, fields, rows=500),
            **measures.exits(folder, test, fields, THRESHOLDS),
        }

    kept = ("plain", "aligned", "cosine-regularised", *SEPARATE)
    variants = {name: {**recipe, "objectives": OBJECTIVES[name]} for name in kept}
    return _study("aligned-sentences", variants, measure)


def images(data: list[str]) -> Study:
    """ViT-shaped classifiers of CIFAR-10 from scratch; figures 2 to 6."""
    folder = Path(data[0])
    test = [str(folder / "test")]
    few = [str(_linked(folder / "test", sorted(ANIMALS + VEHICLES), 200))]

    def measure(trained: Path) -> dict[str, Any]:
        return {
            **measures.quality(trained),
            **measures.look(trained, few, rows=1000),
            **measures.exits(trained, few, {}, OF_IMAGES),
            **measures.shifted(trained, folder / "test"),
        }

    recipe = _vit([str(folder / "train")], test)
    kept = ("plain", "aligned", *SEPARATE)
    variants = {name: {**recipe, "objectives": OBJECTIVES[name]} for name in kept}
    for depth in (2, 4):
        config = {**recipe["config"], "num_hidden_layers": depth}
        variants[f"plain, {depth} layers"] = {**recipe, "config": config, "objectives": ["ce"]}
    return _study("aligned-images", variants, measure)


def residuals(data: list[str]) -> Study:
    """Plain and aligned: what layers add to the states, and convergence; figures 1, 4b, 10."""
    folder = Path(data[0])
    test = [str(folder / "test")]
    recipe = _vit([str(folder / "train")], test)
    recipe["training"] |= {"eval_strategy": "steps", "eval_steps": 250}

    def measure(trained: Path) -> dict[str, Any]:
        return {**measures.curve(trained), **measures.residuals(trained, test)}

    variants = {name: {**recipe, "objectives": OBJECTIVES[name]} for name in ("plain", "aligned")}
    return _study("aligned-residuals", variants, measure)


def transfer(data: list[str]) -> Study:
    """The same trained on animals, then a linear classifier of vehicles at each layer; figure 6."""
    folder = Path(data[0])
    animals = {split: [str(_linked(folder / split, ANIMALS))] for split in ("train", "test")}
    vehicles = [str(_linked(folder / "test", VEHICLES))]

    def measure(trained: Path) -> dict[str, Any]:
        return {**measures.quality(trained), **measures.probes(trained, vehicles)}

    recipe = _vit(animals["train"], animals["test"])
    variants = {name: {**recipe, "objectives": OBJECTIVES[name]} for name in ("plain", "aligned")}
    return _study("aligned-transfer", variants, measure)


def _vit(train: list[str], test: list[str]) -> dict[str, Any]:
    return {
        "config": {
            "architecture": "vit",
            "num_hidden_layers": 6,
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_attention_heads": 3,
            "image_size": 32,
            "patch_size": 8,
        },
        "data": {
            "format": "images",
            "files": train,
            "validation_files": test,
            "validation_blocks": 2000,
        },
        "exit_layers": "all",
        "training": {
            "max_steps": 1500,
            "per_device_train_batch_size": 64,
            "per_device_eval_batch_size": 128,
            "learning_rate": 1.0e-3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 100,
            "weight_decay": 0.05,
        },
    }


def _linked(folder: Path, classes: Sequence[str], images: int | None = None) -> Path:
    """A folder of links to some classes, and so many images of each; gone when Python ends."""
    chosen = tempfile.TemporaryDirectory(prefix="images-")
    atexit.register(chosen.cleanup)
    for name in classes:
        (Path(chosen.name) / name).mkdir()
        for image in sorted((folder / name).resolve().iterdir())[:images]:
            (Path(chosen.name) / name / image.name).symlink_to(image)
    return Path(chosen.name)


def _study(
    name: str, variants: dict[str, dict[str, Any]], measure: Callable[[Path], dict[str, Any]]
) -> Study:
    return Study(
        name,
        [Run(variant, seed, recipe, measure) for seed, variant, recipe in seeds_of(variants)],
    )


if __name__ == "__main__":
    study_command(
        __doc__,
        {
            "texts": texts,
            "writing": writing,
            "sentences": sentences,
            "images": images,
            "transfer": transfer,
            "residuals": residuals,
        },
    )
