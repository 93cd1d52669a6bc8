"""The pages of docs/papers say what their studies' JSON says; studies go on where they stopped."""

import importlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from exitserve_training.losses import OutputHead
from exitserve_training.objectives import registry
from exitserve_training.objectives.objective import LossInputs
from exitserve_training.objectives.options import BuildContext

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for page in (ROOT / "docs" / "papers").glob("*.md") if page.stem != "reproduce")


@pytest.fixture(scope="module")
def script() -> Iterator[Callable[[str], ModuleType]]:
    """A script of benchmarks/papers as a module, which finds those beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks" / "papers")
        yield importlib.import_module


@pytest.fixture(scope="module")
def pages(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("pages")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_tables_are_those_of_the_results(page: Path, pages: ModuleType) -> None:
    text = page.read_text(encoding="utf-8")
    assert pages.MARKED.search(text), "a page without a number of ours"
    assert pages.filled(text) == text, "run python benchmarks/papers/pages.py"
    for line in text.splitlines():
        if line.startswith("!["):
            assert (page.parent / line.split("(")[1].rstrip(")")).is_file(), line


def test_variants_are_compared_at_equal_steps_and_at_equal_loss(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def along(*losses: float) -> dict[str, Any]:
        """Of the last of two layers, measured after 10, 20, ... steps."""
        layers = [{"1": {"agreement": loss / 10}, "2": {"loss": loss}} for loss in losses]
        return {"along": {str(10 * at): {"layers": one} for at, one in enumerate(layers, start=1)}}

    tables = script("tables")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    runs = {"plain/0": along(5, 4), "other/0": along(4.5, 3.5), "worse/0": along(7, 6)}
    (tmp_path / "small.json").write_text(json.dumps({"runs": runs}), encoding="utf-8")
    columns = [("agreement", tables.at_depth("layers", "agreement", 1), ".2f")]
    for equal, other, worse in (
        ("steps", "-0.500 -0.05", "+2.000 +0.20"),
        # Where plain ends; and where the worse one ends, which plain was before its first point.
        ("loss", "-5 +0.00", "+10 +0.10"),
    ):
        lines = tables.along_table("small", 2, columns, equal).splitlines()[-2:]
        assert [" ".join(line.replace("|", " ").split()[1:]) for line in lines] == [other, worse]


def test_objectives_and_models_of_studies_that_recipes_do_not_have(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "OBJECTIVES", dict(registry.OBJECTIVES))
    script("nitp")
    states = {1: torch.tensor([[[9.0, 9.0], [math.log(3.0), 0.0]]]), 2: torch.zeros(1, 2, 2)}
    head = OutputHead(nn.Identity(), nn.Linear(2, 2))
    every, labels = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.long)
    batch = LossInputs(0, states, labels, every, head, head.norm, nn.Embedding(2, 2))
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    for distance, expected in (("smooth_l1", (math.log(3.0) - 0.5) / 2), ("kl", kl)):
        chosen = {"target_layer": 1, "project": False, "distance": distance}
        options = registry.OBJECTIVES["nitp_distance"](**chosen)
        loss, _ = options.build(BuildContext((), 2, 2, head, seed=0))(batch)
        assert loss.item() == pytest.approx(expected)
    digits = script("digits")
    monkeypatch.setattr(digits, "STEPS", 0)
    images = torch.rand(20, 4), torch.arange(20) % 10
    measured = digits.run(dict.fromkeys(("train", "t10k"), images), False, True, seed=0)
    assert measured["curve"]["0"] == pytest.approx(math.log(10), abs=0.5)


def test_a_study_goes_on_where_it_stopped(
    script: Callable[[str], ModuleType],
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    study, measures = script("study"), script("measures")
    measured = []

    def measure(folder: Path) -> dict[str, Any]:
        measured.append(folder)
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        along = measures.curve(folder)
        assert along["loss"] == pytest.approx(report["last_layer"]["loss"], abs=1e-4)
        assert list(along["curve"]) == ["0", "1", "2"]
        states = measures.spread_of_states(folder, [str(text_file)], rows=2)["states"]
        assert list(states) == ["1", "2"]
        assert all(1.0 <= one["effective_rank"] <= 32.0 for one in states.values())
        exits = measures.exits_of_texts(folder, [str(text_file)], rows=2)
        assert 0.0 <= exits["layers"]["1"]["agreement"] <= exits["layers"]["2"]["agreement"] == 1.0
        assert 2.0 >= exits["speedup"]["0.95"] >= exits["speedup"]["0.98"] >= 1.0
        return {"kept": len(measured)}

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    recipe = {
        "config": {"architecture": "llama", "num_hidden_layers": 2, **sizes},
        "tokenizer": {"train_bpe": {"vocab_size": 300}},
        "data": {"files": [str(text_file)], "sequence_length": 32, "validation_blocks": 4},
        "training": {
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "eval_strategy": "steps",
            "eval_steps": 1,
        },
    }
    # The second goes on from a model that another recipe has begun.
    runs = [study.Run("plain", 0, recipe, measure), study.Run("plain", 1, recipe, measure, recipe)]
    assert [run.steps for run in runs] == [2, 2]
    study.Study("small", runs[:1], tmp_path).go_on()
    study.Study("small", runs, tmp_path).go_on()
    assert len(measured) == 2, "the first run is not made again"
    told = capsys.readouterr().out
    assert "1 of 2 runs to make, about 1 minute on this machine" in told
    assert not any(folder.exists() for folder in measured)
    found = json.loads((tmp_path / "small.json").read_text(encoding="utf-8"))
    assert list(found["runs"]) == ["plain/0", "plain/1"]
    assert found["runs"]["plain/1"]["kept"] == 2
    study.Study("small", runs, tmp_path).go_on()
    assert "all 2 runs are in small.json" in capsys.readouterr().out
