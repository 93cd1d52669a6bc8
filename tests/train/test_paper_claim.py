"""The aligned-training paper's claim at tiny scale: exits gain much, the last layer loses little.

A plain model is fine-tuned twice with the same data, seed and number of steps: once plainly,
once aligned (alternating, as the paper does).
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

TINY = Path(__file__).parents[2] / "training" / "recipes" / "tiny" / "aligned.yaml"


@pytest.fixture(scope="module")
def perplexities(
    tmp_path_factory: pytest.TempPathFactory, train: Callable[..., int]
) -> dict[str, dict[str, float]]:
    folder = tmp_path_factory.mktemp("claim")

    def run(name: str, *overrides: str) -> dict[str, float]:
        out = folder / name
        assert train(TINY, f"output_dir={out}", "training.disable_tqdm=true", *overrides) == 0
        report = json.loads((out / "report.json").read_text(encoding="utf-8"))
        return {depth: quality["perplexity"] for depth, quality in report["layers"].items()}

    run("start", "objectives=[ce]", "training.max_steps=200")
    tune = [f"model={folder / 'start'}", "config=null", "tokenizer=null"]
    tune += ["training.max_steps=200", "training.learning_rate=1.5e-3"]
    return {name: run(name, f"objectives=[{name}]", *tune) for name in ("ce", "aligned")}


@pytest.mark.parametrize("depth", ["1", "2"])
def test_aligned_training_lowers_perplexity_at_every_exit(
    perplexities: dict[str, dict[str, float]], depth: str
) -> None:
    assert perplexities["aligned"][depth] < perplexities["ce"][depth]


def test_last_layer_stays_within_five_percent(perplexities: dict[str, dict[str, float]]) -> None:
    assert perplexities["aligned"]["4"] <= 1.05 * perplexities["ce"]["4"]
