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
from PIL import Image
from transformers import ViTConfig

from exitserve_training.classification.images import ImageReader
from exitserve_training.classification.inputs import image_processor
from exitserve_training.classification.labelled import load_split_examples, read_examples
from exitserve_training.data_recipe import DataRecipe
from exitserve_training.draws import Augmentation
from exitserve_training.recipe import load_recipe

GLUE = Path(__file__).parents[3] / "training" / "recipes" / "papers" / "aligned-bert-glue.yaml"
TASKS = {  # of each kind one: with scores, and with splits of its own
    "cola": ("sentence", None),
    "stsb": ("sentence1", "sentence2"),
    "mnli": ("premise", "hypothesis"),
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
def test_one_recipe_reads_each_kind_of_glue(task: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_decoded_from_folders_arrays_and_data_sets(
    channels: int, images: Path, tmp_path: Path
) -> None:
    known = read_examples(DataRecipe(format="images", files=[str(images)]), [str(images)])
    pixels = np.stack([np.asarray(Image.open(str(name))) for name in known.inputs])
    names = sorted(set(known.classes))
    numbers = [names.index(name) for name in known.classes]
    file = tmp_path / "cifar102_test.npz"
    np.savez(file, images=pixels, labels=numbers, label_names=names)
    shutil.copytree(images, tmp_path / "set" / "test")
    recipe = DataRecipe(
        format="images", files=[str(file)], dataset=str(tmp_path / "set"), split="test"
    )
    found = read_examples(recipe, [*recipe.files, str(images)], "test")
    assert found.inputs[::180] == [f"{file}#0", "test#0", known.inputs[0]]
    assert found.classes == known.classes * 3
    reader = ImageReader(
        recipe, image_processor(None, ViTConfig(image_size=12, num_channels=channels))
    )
    read = reader([{"image": name, "labels": 0} for name in found.inputs])["pixels"]
    assert torch.equal(read, read[:180].repeat(3, 1, 1, 1))
    assert read.shape == (540, channels, 12, 12)
    if channels == 3:
        expected = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1.0
        torch.testing.assert_close(read[:180], expected, rtol=1e-5, atol=1e-6)  # float32


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 1000), st.integers(0, 5))
def test_augmentation_depends_on_step_and_image_alone(step: int, seed: int) -> None:
    pixels = torch.randn(5, 3, 8, 8, generator=torch.manual_seed(seed))
    change = Augmentation(seed)
    whole = change(step, pixels)
    order = [3, 0, 4]
    torch.testing.assert_close(change(step, pixels[order]), whole[order])
    assert whole.isfinite().all()
