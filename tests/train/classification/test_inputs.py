"""What classifiers read: tables as they come, images when they are needed, and a little changed."""

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exitserve_training.classification.images import ImageReader
from exitserve_training.classification.labelled import load_split_examples, read_examples
from exitserve_training.data_recipe import DataRecipe
from exitserve_training.draws import Augmentation
from exitserve_training.recipe import load_recipe

GLUE = Path(__file__).parents[3] / "training" / "recipes" / "papers" / "aligned-bert-glue.yaml"
TASKS = {
    "cola": ("sentence", None),
    "sst2": ("sentence", None),
    "mrpc": ("sentence1", "sentence2"),
    "stsb": ("sentence1", "sentence2"),
    "qqp": ("question1", "question2"),
    "mnli": ("premise", "hypothesis"),
    "qnli": ("question", "sentence"),
    "rte": ("sentence1", "sentence2"),
    "wnli": ("sentence1", "sentence2"),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_tables_are_read_as_they_are(tmp_path: Path) -> None:
    # CoLA's way: no header, a mark that is often empty, quotes that do not pair, the word NA.
    file = tmp_path / "cola.tsv"
    file.write_text('gj04\t1\t\tHe said "no.\ngj04\t0\t*\tNA\n', encoding="utf-8")
    recipe = DataRecipe(
        format="labelled",
        files=[str(file)],
        columns=["source", "label", "mark", "sentence"],
        text_field="sentence",
    )
    examples = read_examples(recipe, recipe.files)
    assert examples.inputs == [('He said "no.', None), ("NA", None)]
    assert examples.classes == ["1", "0"]


@pytest.mark.parametrize("task", TASKS)
def test_one_recipe_reads_all_of_glue(task: str, tmp_path: Path) -> None:
    first, second = TASKS[task]
    held_out = "validation_matched" if task == "mnli" else "validation"
    splits = {"train": range(9), held_out: range(10, 13), "test": range(20, 22)}
    listed = [{"split": split, "path": f"{split}.jsonl"} for split in splits]
    card = json.dumps({"configs": [{"config_name": task, "data_files": listed}]})
    (tmp_path / "README.md").write_text(f"---\n{card}\n---\n")
    for split, numbers in splits.items():
        rows: list[dict[str, Any]] = [
            {first: f"a {n}", second or "idx": f"b {n}", "label": n % 3} for n in numbers
        ]
        if task == "stsb":
            rows = [{**row, "label": row["label"] + 0.4} for row in rows]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    fields = [f"data.dataset={tmp_path}", f"data.dataset_config={task}"]
    fields += [f"data.text_field={first}", f"data.validation_split={held_out}"]
    recipe = load_recipe(GLUE, [*fields, *([f"data.pair_field={second}"] if second else [])])
    train, validation = load_split_examples(recipe.data, 0)
    assert sorted(train.inputs) == [(f"a {n}", f"b {n}" if second else None) for n in range(9)]
    assert validation.inputs == [(f"a {n}", f"b {n}" if second else None) for n in range(10, 13)]
    assert validation.classes == ["1", "2", "0"]


def test_images_are_decoded_from_folders_arrays_and_data_sets(images: Path, tmp_path: Path) -> None:
    recipe = DataRecipe(format="images", files=[str(images)])
    known = read_examples(recipe, recipe.files)
    pixels = ImageReader(recipe, 12, 3)([{"image": name, "labels": 0} for name in known.inputs])
    names = sorted(set(known.classes))
    file = tmp_path / "cifar102_test.npz"
    np.savez(
        file,
        images=pixels["pixels"].permute(0, 2, 3, 1).numpy(),
        labels=[names.index(name) for name in known.classes],
        label_names=names,
    )
    shutil.copytree(images, tmp_path / "set" / "test")
    recipe = DataRecipe(
        format="images", files=[str(file)], dataset=str(tmp_path / "set"), split="test"
    )
    found = read_examples(recipe, recipe.files, "test")
    assert found.inputs[0] == f"{file}#0"
    assert found.inputs[-1] == "test#179"
    assert found.classes == known.classes * 2
    same = ImageReader(recipe, 12, 3)([{"image": name, "labels": 0} for name in found.inputs])
    assert torch.equal(same["pixels"], pixels["pixels"].repeat(2, 1, 1, 1))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 1000), st.integers(0, 5))
def test_augmentation_depends_on_step_and_image_alone(step: int, seed: int) -> None:
    pixels = torch.randint(256, (5, 3, 8, 8), dtype=torch.uint8, generator=torch.manual_seed(seed))
    values = pixels.float()
    change = Augmentation(seed)
    whole = change(step, pixels, values)
    order = [3, 0, 4]
    torch.testing.assert_close(change(step, pixels[order], values[order]), whole[order])
    assert whole.isfinite().all()
