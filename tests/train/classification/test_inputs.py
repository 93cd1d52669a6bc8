"""What classifiers read: tables as they come, images when they are needed, and a little changed."""

import json
import shutil
from pathlib import Path

import numpy as np
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


def test_one_recipe_reads_all_of_glue(tmp_path: Path) -> None:
    """MNLI's pairs, with STS-B's scores."""
    folder = tmp_path / "glue"
    folder.mkdir()
    for split, numbers in (("train", range(9)), ("validation", range(10, 13))):
        rows = [{"premise": f"a {n}", "hypothesis": "b", "label": n % 3 + 0.4} for n in numbers]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    changes = ["dataset_config=null", "text_field=premise", "pair_field=hypothesis"]
    recipe = load_recipe(GLUE, [f"data.{one}" for one in (*changes, f"dataset={folder}")])
    train, validation = load_split_examples(recipe.data, 0)
    assert sorted(train.inputs) == [(f"a {n}", "b") for n in range(9)]
    assert validation.inputs == [(f"a {n}", "b") for n in range(10, 13)]
    assert validation.classes == ["1", "2", "0"]


def test_images_are_decoded_from_folders_arrays_and_data_sets(images: Path, tmp_path: Path) -> None:
    known = read_examples(DataRecipe(format="images", files=[str(images)]), [str(images)])
    pixels = np.stack([np.asarray(Image.open(str(name))) for name in known.inputs])
    names, numbers = np.unique(known.classes, return_inverse=True)
    file = tmp_path / "cifar102_test.npz"
    np.savez(file, images=pixels, labels=numbers, label_names=names)
    shutil.copytree(images, tmp_path / "set" / "test")
    sources = {"files": [str(file)], "dataset": str(tmp_path / "set"), "split": "test"}
    recipe = DataRecipe(format="images", **sources)
    found = read_examples(recipe, [*recipe.files, str(images)], "test")
    assert found.inputs[::180] == [f"{file}#0", "test#0", known.inputs[0]]
    assert found.classes == known.classes * 3
    for channels in (1, 3):
        config = ViTConfig(image_size=12, num_channels=channels)
        reader = ImageReader(recipe, image_processor(None, config))
        read = reader([{"image": name, "labels": 0} for name in found.inputs])["pixels"]
        assert torch.equal(read, read[:180].repeat(3, 1, 1, 1))
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
