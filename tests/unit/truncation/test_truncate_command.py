"""`exitserve truncate`: the checkpoint it writes, for every family, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from exitserve.checkpoint.block import MultiExit, read_config, read_multi_exit, write_multi_exit
from exitserve.checkpoint.calibration import OperatingPoint
from exitserve.checkpoint.decoder import FAMILIES, capture_hidden, decoder_parts
from exitserve.checkpoint.weights import INDEX
from exitserve.cli import main

from ...shapes import calibration_of

EXPERTS = {"num_experts_per_tok": 2}
WINDOWS = {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gemma2", WINDOWS),
    ("gemma3_text", WINDOWS | {"sliding_window_pattern": 3}),
    ("gemma3_text", WINDOWS | {"layer_types": ["full_attention", "sliding_attention"] * 3}),
    ("gpt2", {}),
    ("gpt2", {"tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True}),
    ("gpt_neox", {"tie_word_embeddings": False}),
    ("llama", {}),
    ("llama", {"tie_word_embeddings": False}),
    ("mistral", {"sliding_window": 8}),
    ("mixtral", {"num_local_experts": 4, **EXPERTS}),
    ("olmo2", {}),
    ("olmo3", {"sliding_window": 8}),
    ("phi3", {"sliding_window": None}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    ("qwen3", {"head_dim": 64}),
    (
        "qwen3_moe",
        {"num_experts": 4, "moe_intermediate_size": 64, "mlp_only_layers": [1, 5], **EXPERTS},
    ),
]


def _truncate(model: Path, out: Path, *options: str) -> int:
    return main(["truncate", str(model), "--out", str(out), *options])


def test_every_family_is_tried() -> None:
    assert {family for family, _ in CASES} == set(FAMILIES)


@pytest.mark.parametrize(("family", "changes"), CASES, ids=lambda case: str(case)[:30])
@pytest.mark.parametrize("depth", [1, 4])
def test_it_says_what_the_full_models_head_says_at_that_layer(
    make_checkpoint, tmp_path: Path, family: str, changes: dict[str, Any], depth: int
) -> None:
    """Bit for bit: the same operations on the same weights. Texts outgrow the windows of 8."""
    model_dir = make_checkpoint(family, **changes)
    out = tmp_path / "out"
    assert _truncate(model_dir, out, "--layers", str(depth)) == 0
    ids = torch.randint(2, 128, (2, 24), generator=torch.Generator().manual_seed(0))
    full = AutoModelForCausalLM.from_pretrained(model_dir)
    parts = decoder_parts(full)
    with torch.no_grad(), capture_hidden(parts.layers, [depth]) as hidden:
        full(ids)
    cut, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        found, expected = cut(ids).logits, parts.classify(hidden[depth])
    assert torch.equal(found, expected)
    assert cut.config.num_hidden_layers == decoder_parts(cut).num_layers == depth
    tied = cut.get_output_embeddings().weight is cut.get_input_embeddings().weight
    assert tied == (full.get_output_embeddings().weight is full.get_input_embeddings().weight)
    if getattr(cut.config, "layer_types", None):
        assert cut.config.layer_types == full.config.layer_types[:depth]


def test_all_layers_are_the_identity(make_checkpoint, tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    shutil.copytree(make_checkpoint("llama"), model_dir)
    point = OperatingPoint(agreement=0.99, thresholds={2: 0.5}, eos_thresholds={2: 1.0})
    calibration = calibration_of(point, num_layers=6)
    write_multi_exit(model_dir, MultiExit(exit_layers=(2, 4), calibration=calibration))
    assert _truncate(model_dir, tmp_path / "all", "--layers", "6") == 0
    assert (tmp_path / "all/config.json").read_bytes() == (model_dir / "config.json").read_bytes()
    before, after = (load_file(one / "model.safetensors") for one in (model_dir, tmp_path / "all"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)

    assert _truncate(model_dir, tmp_path / "cut", "--layers", "4") == 0
    block = read_multi_exit(tmp_path / "cut")
    assert block is not None and block.exit_layers == (2,) and block.calibration is not None
    assert block.calibration.chosen.thresholds == {2: 0.5}
    assert block.calibration.chosen.agreement is None, "that was about six layers"


def test_files_that_belong_and_the_card(bundled: Path, tmp_path: Path, capsys) -> None:
    model_dir = tmp_path / "full"
    shutil.copytree(bundled, model_dir)
    for name in ("LICENSE", "NOTICE.txt", "optimizer.pt", "trainer_state.json"):
        (model_dir / name).write_text(name)
    (model_dir / "exit_rows").mkdir()
    (model_dir / "exit_rows" / "rows.safetensors").write_text("rows")
    (model_dir / "checkpoint-1").mkdir()
    (model_dir / "checkpoint-1" / "tokenizer.json").write_text("{}")
    out = tmp_path / "six"
    assert _truncate(model_dir, out, "--layers", "6") == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "LICENSE",
        "NOTICE.txt",
        "README.md",
        "chat_template.jinja",
        "config.json",
        "exit_rows",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert "multi_exit" not in read_config(out)
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\nlicense: apache-2.0\n")
    assert "first **6 of 24** decoder layers of `full`" in card
    assert "objective `aligned`, at layers 6, 12, 18: this depth is one of them" in card
    assert "| perplexity | not measured |" in card
    assert "A very small decoder" not in card, "the full model's own card is not copied"
    assert str(tmp_path) not in card
    ids = [
        AutoTokenizer.from_pretrained(one).apply_chat_template([{"role": "user", "content": "def"}])
        for one in (bundled, out)
    ]
    assert ids[0] == ids[1]
    assert "Warning" not in capsys.readouterr().out


def test_a_sharded_and_quantised_checkpoint(quantised: Path, tmp_path: Path, capsys) -> None:
    model_dir = tmp_path / "shards"
    shutil.copytree(quantised, model_dir)
    tensors = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    shard_of = {name: f"model-{at % 3}.safetensors" for at, name in enumerate(sorted(tensors))}
    for file in set(shard_of.values()):
        part = {name: tensors[name] for name in tensors if shard_of[name] == file}
        save_file(part, model_dir / file, {"format": "pt"})
    (model_dir / INDEX).write_text(json.dumps({"weight_map": shard_of}))
    assert _truncate(model_dir, tmp_path / "out", "--layers", "12") == 0
    files = (tmp_path / "out").glob("*.safetensors")
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert {name for name in tensors if layer(name) < 12} == set(found)
    for name, tensor in found.items():
        assert tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name])
    assert _truncate(model_dir, tmp_path / "no", "--layers", "12", "--data", __file__) == 2
    assert "quantised weights is not measured" in capsys.readouterr().err
    config = read_config(tmp_path / "out")
    assert config["quantization_config"] == read_config(quantised)["quantization_config"]


def layer(name: str) -> int:
    return int(name.split(".")[2]) if ".layers." in name else -1


def test_to_fit_takes_the_deepest_exit_that_fits(bundled: Path, tmp_path: Path, capsys) -> None:
    """In bfloat16: six layers have 10.4 MiB, twelve 18.9; of a budget 0.9 are used."""
    out = tmp_path / "fit"
    assert _truncate(bundled, out, "--to-fit", "15MiB", "--requests", "2") == 0
    assert read_config(out)["num_hidden_layers"] == 6
    printed = capsys.readouterr().out
    assert "requests of 512 tokens" in printed and "does not fit" in printed
    assert _truncate(bundled, tmp_path / "all", "--to-fit", "1GB") == 0
    assert read_config(tmp_path / "all")["num_hidden_layers"] == 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give one of --layers N and --to-fit SIZE"),
        (("--layers", "6", "--to-fit", "1GiB"), "give one of"),
        (("--layers", "0"), "from 1 to 24 is allowed"),
        (("--layers", "25"), "from 1 to 24 is allowed"),
        (("--to-fit", "8"), "such as 8GiB"),
        (("--to-fit", "5MiB"), "the smallest, 6 of 24 layers, needs"),
        (("--to-fit", "1GiB", "--context", "600"), "longer than the model's context of 512"),
        (("--to-fit", "1GiB", "--requests", "0"), "--requests must be at least 1, not 0"),
        (("--layers", "6", "--data", "no/such.txt"), "no data file at"),
    ],
)
def test_bad_options(
    capsys, bundled: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    assert _truncate(bundled, tmp_path / "out", *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("exitserve: ") and error.count("\n") == 1 and message in error
    assert list(tmp_path.iterdir()) == []


def test_a_destination_that_exists(capsys, bundled: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for out in (tmp_path, tmp_path / "mine.txt"):
        assert _truncate(bundled, out, "--layers", "6") == 2
        assert "exists; give another" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert _truncate(bundled, tmp_path / "empty", "--layers", "6") == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bert"}, "model type 'bert' is not supported; supported: gemma2"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a causal language model"),
        ({"num_hidden_layers": 25}, "no tensor is named as part of layer 24"),
        ({"num_hidden_layers": 16}, "exit layer 18 is out of range"),
        ({"multi_exit": {"version": 1, "exit_layers": [2], "rows": "0" * 64}}, "names exit rows"),
    ],
)
def test_checkpoints_that_cannot_be_cut(
    capsys, bundled: Path, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    model_dir = tmp_path / "model"
    shutil.copytree(bundled, model_dir)
    (model_dir / "config.json").write_text(json.dumps(read_config(bundled) | config))
    assert _truncate(model_dir, tmp_path / "out", "--layers", "6") == 2
    assert message in capsys.readouterr().err
