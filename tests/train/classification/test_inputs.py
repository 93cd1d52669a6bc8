"""What classifiers read: tables as they come, and images a little changed."""

from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exitserve_training.classification.labelled import read_examples
from exitserve_training.data_recipe import DataRecipe
from exitserve_training.draws import Augmentation


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
