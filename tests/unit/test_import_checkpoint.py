"""Checkpoints trained elsewhere become ones whose exits are named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exitserve.checkpoint.block import BLOCK, read_multi_exit
from exitserve.cli import main

MakeCheckpoint = Callable[..., Path]


@pytest.fixture
def elsewhere(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> Callable[..., Path]:
    """A checkpoint without a block, with changes to its config and more tensors."""

    def make(family: str, *, tensors: dict[str, Any] | None = None, **config: Any) -> Path:
        import shutil

        folder = tmp_path / "elsewhere"
        shutil.copytree(make_checkpoint(family), folder)
        known = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        del known[BLOCK]
        (folder / "config.json").write_text(json.dumps({**known, **config}), encoding="utf-8")
        if tensors:
            weights = load_file(folder / "model.safetensors") | tensors
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def imported(model: Path, out: Path, *options: str) -> int:
    return main(["import", str(model), "--out", str(out), *options])


def test_a_stock_llama_gets_the_exits_it_was_trained_with(
    elsewhere: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As LayerSkip's checkpoints are: nothing in them tells of exits."""
    from transformers import AutoModelForCausalLM

    model, out = elsewhere("llama"), tmp_path / "out"
    left = model / "model.safetensors.index.json"  # of shards that a whole file replaced
    left.write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert imported(model, out, "--exit-layers", "2,4") == 0
    assert not (out / left.name).exists()
    assert f"exitserve serve {model} --exit-layers 2,4" in capsys.readouterr().out
    block = read_multi_exit(out)
    assert block is not None and block.exit_layers == (2, 4)
    assert (out / "tokenizer.json").is_file()
    ids = torch.arange(8)[None]
    logits = [AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (model, out)]
    assert torch.equal(*logits)
    assert read_multi_exit(model) is None, "the original is as it was"


def test_the_aligned_paper_s_gpt2_names_its_exits_itself(
    elsewhere: Callable[..., Path], tmp_path: Path
) -> None:
    model = elsewhere(
        "gpt2", architectures=["MultiExitGPT2"], lm_head_layer_indices=[6, 5, 4, 3, 2, 1]
    )
    assert imported(model, tmp_path / "out") == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config[BLOCK]["exit_layers"] == [1, 2, 3, 4, 5]
    assert config[BLOCK]["objective"] == "aligned"
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert "lm_head_layer_indices" not in config


@pytest.mark.parametrize(
    "name",
    [
        "lm_head_4.weight",
        "exit_heads.2.weight",
        "model.layers.2.exit_head.weight",
        "model.layers.2.lm_head.weight",
        "early_exit_norm.weight",
    ],
)
def test_heads_of_their_own_are_refused_by_name(
    elsewhere: Callable[..., Path], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = elsewhere("llama", tensors={name: torch.zeros(2, 2)})
    assert imported(model, tmp_path / "out", "--exit-layers", "2") == 2
    assert f"tensor '{name}' is no part of a decoder with one norm" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "names no exits; give --exit-layers with depths below 6"),
        (["--exit-layers", "2,6"], "exit layer 6 is out of range"),
        (["--exit-layers", "4,2"], "write [2, 4]"),
    ],
)
def test_layers_that_do_not_fit(
    elsewhere: Callable[..., Path],
    tmp_path: Path,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert imported(elsewhere("llama"), tmp_path / "out", *options) == 2
    assert message in capsys.readouterr().err


def test_pickles_other_families_and_known_exits_are_refused(
    elsewhere: Callable[..., Path],
    make_checkpoint: MakeCheckpoint,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    assert imported(make_checkpoint("llama"), out, "--exit-layers", "2") == 2
    assert "has a multi_exit block already" in capsys.readouterr().err
    model = elsewhere("llama")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert imported(model, out, "--exit-layers", "2") == 2
    assert "are pickles (pytorch_model.bin)" in capsys.readouterr().err
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**config, "model_type": "t5"}))
    assert imported(model, out, "--exit-layers", "2") == 2
    assert "model type 't5' is not supported" in capsys.readouterr().err
