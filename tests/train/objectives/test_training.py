"""Each objective moves its own quantity, in tiny twins that differ in nothing else.

One small model, one text, one seed, 200 steps. Each run measures its own objective on held-out
text, and the run with cross-entropy alone measures all (an objective of weight 0 is measured, not
trained). The text needs few directions, so a model of width 64 has room to condense in, which is
where SimReg, dispersion and NITP have work to do.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ...shapes import LLAMA

pytestmark = pytest.mark.nightly

Report = dict[str, Any]

RUNS: dict[str, list[Any]] = {
    "ce": ["ce"],
    "aligned": [{"name": "aligned", "layers": "all"}],
    "sampled": [{"name": "aligned", "layers": "all", "sample": 1}],
    "cosine_alignment": ["ce", {"name": "cosine_alignment"}],
    "kl_to_last": ["ce", "kl_to_last"],
    "separate_classifiers": ["separate_classifiers"],
    "simreg": ["ce", {"name": "simreg"}],
    "dispersion": ["ce", {"name": "dispersion"}],
    "nitp": ["ce", {"name": "nitp"}],
    "headless": ["headless"],
}
MEASURED = ["simreg", "dispersion", "nitp", "headless", "cosine_alignment"]


@pytest.fixture(scope="module")
def report(
    tmp_path_factory: pytest.TempPathFactory, text_file: Path, train: Callable[..., int]
) -> Callable[[str], Report]:
    """The report of a run of `RUNS`, trained when first asked for."""
    folder = tmp_path_factory.mktemp("twins")
    done: dict[str, Report] = {}

    def run(name: str) -> Report:
        if name not in done:
            # What others are compared with.
            also = [{"name": n, "weight": 0.0} for n in MEASURED] if name == "ce" else []
            recipe = folder / f"{name}.yaml"
            recipe.write_text(json.dumps(twin(text_file, folder / name, RUNS[name] + also)))
            assert train(recipe) == 0
            done[name] = json.loads((folder / name / "report.json").read_text(encoding="utf-8"))
        return done[name]

    return run


def twin(text: Path, out: Path, objectives: list[Any]) -> dict[str, Any]:
    return {
        "output_dir": str(out),
        "config": {
            **LLAMA,
            "hidden_size": 64,
            "intermediate_size": 176,
            "head_dim": 32,
            "tie_word_embeddings": True,
        },
        "tokenizer": {"train_bpe": {"vocab_size": 300}},
        "data": {"files": [str(text)], "sequence_length": 64, "validation_fraction": 0.05},
        "objectives": objectives,
        "exit_layers": [1, 2, 3],
        "seed": 20,
        "training": {
            "max_steps": 200,
            "per_device_train_batch_size": 4,
            "learning_rate": 3e-3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 20,
            "weight_decay": 0.1,
            "disable_tqdm": True,
        },
    }


def perplexity(report: Report, depth: int = 4) -> float:
    return float(report["layers"][str(depth)]["perplexity"])


@pytest.mark.parametrize("name", ["aligned", "sampled", "kl_to_last", "separate_classifiers"])
def test_inner_exits_predict_better(report: Callable[[str], Report], name: str) -> None:
    for depth in (1, 2, 3):
        assert perplexity(report(name), depth) < perplexity(report("ce"), depth)


@pytest.mark.parametrize("name", ["cosine_alignment", "simreg", "nitp"])
def test_an_objective_halves_its_own_loss(report: Callable[[str], Report], name: str) -> None:
    # Of NITP: an untrained projector's loss is about 1, that of orthogonal vectors.
    trained, plain = (report(run)["metrics"][f"{name}_loss"] for run in (name, "ce"))
    assert trained < 0.5 * plain


def test_states_spread(report: Callable[[str], Report]) -> None:
    spread, plain = report("dispersion")["metrics"], report("ce")["metrics"]
    assert spread["dispersion_loss"] < plain["dispersion_loss"]
    assert spread["mean_cosine"] < plain["mean_cosine"]
    assert report("nitp")["metrics"]["effective_rank"] > plain["effective_rank"]


def test_headless_training_ranks_the_right_token_high(report: Callable[[str], Report]) -> None:
    """Read through the input embeddings, as the head that is recovered later begins."""
    headless = report("headless")
    assert headless["metrics"]["headless_loss"] < report("ce")["metrics"]["headless_loss"]
    assert headless["layers"]["4"]["accuracy"] > 0.8, "of 300 tokens"


@pytest.mark.parametrize(
    "name", ["aligned", "cosine_alignment", "kl_to_last", "simreg", "dispersion", "nitp"]
)
def test_the_last_layer_stays_within_five_percent(
    report: Callable[[str], Report], name: str
) -> None:
    assert perplexity(report(name)) <= 1.05 * perplexity(report("ce"))
