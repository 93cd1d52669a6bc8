"""What a chat run saves: what transformers accepts, and what serving needs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from exitserve.errors import ExitServeError

MakeRecipe = Callable[..., Path]
Train = Callable[..., int]


@pytest.fixture
def says(marked_chat_model: Path, tmp_path: Path) -> Callable[..., str]:
    """A chat model whose `generation_config.json` says more."""

    def make(**keys: Any) -> str:
        folder = tmp_path / "says"
        shutil.copytree(marked_chat_model, folder, dirs_exist_ok=True)
        file = folder / "generation_config.json"
        known = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**known, **keys}), encoding="utf-8")
        return str(folder)

    return make


def test_generation_config_can_be_saved_and_ends_at_the_end_of_a_turn(
    chat_recipe: MakeRecipe, says: Callable[..., str], tmp_path: Path, train: Train
) -> None:
    with pytest.raises(ExitServeError, match=r"could not be saved.*length_penalty"):
        train(chat_recipe(model=says(length_penalty=2.0)))
    assert not (tmp_path / "out").exists()
    model = says(length_penalty=1.0, temperature=0.9, top_p=0.6)
    assert train(chat_recipe(model=model), "training.max_steps=1") == 0
    saved = GenerationConfig.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (saved.do_sample, saved.temperature, saved.top_p) == (True, 0.9, 0.6)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert saved.eos_token_id == ends
