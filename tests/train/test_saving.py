"""What a run saves: what transformers accepts, and what serving needs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig

from exitserve.checkpoint.adapters import merged_checkpoint
from exitserve.checkpoint.block import read_multi_exit
from exitserve.errors import ExitServeError
from exitserve.reference import load_reference

from ..shapes import LLAMA


def test_generation_config_can_be_saved_and_ends_at_the_end_of_a_turn(
    chat_recipe: Callable[..., Path],
    marked_chat_model: Path,
    tmp_path: Path,
    train: Callable[..., int],
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(marked_chat_model, model)
    file = model / "generation_config.json"
    keys = json.loads(file.read_text(encoding="utf-8")) | {"temperature": 0.9, "top_p": 0.6}
    file.write_text(json.dumps({**keys, "length_penalty": 2.0}), encoding="utf-8")
    with pytest.raises(ExitServeError, match=r"could not be saved.*length_penalty"):
        train(chat_recipe(model=str(model)))
    assert not out.exists()
    file.write_text(json.dumps(keys), encoding="utf-8")
    assert train(chat_recipe(model=str(model)), "training.max_steps=1") == 0
    saved, tokenizer = GenerationConfig.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert (saved.do_sample, saved.temperature, saved.top_p) == (True, 0.9, 0.6)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert saved.eos_token_id == [tokenizer.eos_token_id, end]


@pytest.mark.usefixtures("merged_cache")
def test_of_a_large_vocabulary_the_frequent_tokens_are_exit_rows(
    make_recipe: Callable[..., Path], text_file: Path, tmp_path: Path, train: Callable[..., int]
) -> None:
    config = {**LLAMA, "vocab_size": 9000}
    assert train(make_recipe(config=config), "training.max_steps=1") == 0
    out = tmp_path / "out"
    rows = load_reference(out).exit_rows
    assert rows is not None and len(rows) == 4096
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = text_file.read_text(encoding="utf-8")
    assert {tokenizer.eos_token_id, *tokenizer(text)["input_ids"]} <= set(rows.tolist())
    given = {"config": None, "tokenizer": None, "model": str(out), "lora": {"rank": 4}}
    assert train(make_recipe(**given), "training.max_steps=1", f"output_dir={tmp_path}/lora") == 0
    block = read_multi_exit(tmp_path / "lora")
    assert block is not None and block.rows and block.trained, "the verdicts are kept"
    assert read_multi_exit(merged_checkpoint(str(out), f"{tmp_path}/lora/adapter")) == block
