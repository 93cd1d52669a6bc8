"""`exitserve train` from recipe to checkpoint: the tiny Python recipe, families, resuming."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from exitserve.checkpoint.block import read_multi_exit

TINY = Path(__file__).parents[2] / "training" / "recipes" / "tiny" / "aligned.yaml"
MakeRecipe = Callable[..., Path]
Train = Callable[..., int]


def read(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, train: Train) -> Path:
    """The tiny recipe as committed, trained once."""
    folder = tmp_path_factory.mktemp("tiny") / "out"
    assert train(TINY, f"output_dir={folder}", "training.disable_tqdm=true") == 0
    return folder


def test_tiny_recipe_learns_at_every_depth(trained: Path) -> None:
    report = read(trained, "report.json")
    assert report["schema_version"] == 1
    assert report["objectives"] == ["aligned"]
    assert report["metrics"] == {}
    assert (report["num_layers"], report["exit_layers"]) == (4, [1, 2])
    assert report["steps"] == 300
    assert report["tokens_seen"] == 300 * 8 * 128
    assert report["seconds"] > 0
    assert set(report["layers"]) == {"1", "2", "4"}
    assert report["last_layer"] == report["layers"]["4"]
    for depth, quality in report["layers"].items():
        assert quality["perplexity"] == pytest.approx(math.exp(quality["loss"]))
        # From ~1000 (uniform over the vocabulary) to a fifth of that or less.
        assert quality["perplexity"] < report["initial_layers"][depth]["perplexity"] / 5
    card = ModelCard.load(trained / "README.md")
    assert card.data.library_name == "transformers"
    for page in ((trained / "report.md").read_text(encoding="utf-8"), card.text):
        assert "| 1 of 4 " in page
    block = read_multi_exit(trained)
    assert block is not None and block.verdict is not None and block.verdict in card.text
    for depth, found in (block.trained or {}).items():
        assert report["exits"][str(depth)]["agreement"] == found.agreement > 0.2


def test_checkpoint_is_an_ordinary_one(trained: Path) -> None:
    block = read_multi_exit(trained)
    assert block is not None
    assert block.exit_layers == (1, 2)
    assert block.objective == "aligned"
    model = AutoModelForCausalLM.from_pretrained(trained)
    tokenizer = AutoTokenizer.from_pretrained(trained)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.use_cache
    inputs = tokenizer("import os\n", return_tensors="pt")
    ids = model.generate(inputs["input_ids"], max_new_tokens=8)
    assert tokenizer.decode(ids[0]).startswith("import os\n")
    # Transformers' own drafts by an exit, with no code of ours.
    drafted = model.generate(inputs["input_ids"], max_new_tokens=8, assistant_early_exit=2)
    assert torch.equal(drafted, ids)
    assert not [path for path in trained.glob("*") if path.suffix in {".bin", ".pt", ".pkl"}]


def test_provenance_and_logs_are_beside_it(trained: Path) -> None:
    run = read(trained, "training_run.json")
    assert run["command"]
    assert torch.__version__.startswith(run["versions"]["torch"]), "with or without the build"
    assert run["recipe"]["objectives"][0]["name"] == "aligned"
    assert "git_revision" in run
    assert run["earlier_sessions"] == []
    logs = EventAccumulator(str(trained / "logs")).Reload()
    tags = set(logs.Tags()["scalars"])
    assert {"train/loss_layer_1", "train/aligned_loss", "train/ce_loss"} <= tags
    assert "eval/perplexity_layer_2" in tags
    assert len(logs.Scalars("train/loss")) == 15


FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"head_dim": 16},
    "gpt2": {},
    "gpt_neox": {"tie_word_embeddings": False, "num_key_value_heads": None},
    "olmo3": {"sliding_window": 8},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_fine_tuning_a_directory_of_each_family(
    make_recipe: MakeRecipe, tmp_path: Path, train: Train, family: str
) -> None:
    sizes = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 2}
    if family != "gpt2":
        sizes |= {"intermediate_size": 64, "num_key_value_heads": 1}
    sizes_of = {"architecture": family, "max_position_embeddings": 32, **sizes, **FAMILIES[family]}
    scratch = make_recipe(config=sizes_of, exit_layers=[1])
    assert train(scratch, "training.max_steps=1", "objectives=[ce]") == 0
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out").to(torch.bfloat16)
    whole.save_pretrained(tmp_path / "out")
    tuned = tmp_path / "tuned"
    recipe = make_recipe(
        config=None, tokenizer=None, model=str(tmp_path / "out"), output_dir=str(tuned)
    )
    # 1e-2 for a model of this size: a few steps must show in the loss.
    assert train(recipe, "training.learning_rate=0.01", "training.max_steps=10") == 0
    report = read(tuned, "report.json")
    config = AutoConfig.from_pretrained(tuned)
    assert (config.model_type, config.dtype) == (family, torch.bfloat16)
    assert report["exit_layers"] == [1, 2]
    for depth in ("1", "2", "3"):
        assert report["layers"][depth]["loss"] < report["initial_layers"][depth]["loss"]
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    after = AutoModelForCausalLM.from_pretrained(tuned).state_dict()
    assert before.keys() == after.keys()
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert any(not torch.equal(before[name], after[name]) for name in before)
