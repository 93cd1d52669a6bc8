"""Tokenizers without a padding token, such as Llama 3's: batches are filled with ends of text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from exitserve_training.chats import chat_collator
from exitserve_training.recipe import load_recipe
from exitserve_training.tokenization import padding_id

from ..shapes import BERT

Train = Callable[..., int]
MakeRecipe = Callable[..., Path]

IGNORED = -100


@pytest.fixture(scope="module")
def unpadded(plain_chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small chat model whose tokenizer and config name no padding token."""
    folder = tmp_path_factory.mktemp("unpadded")
    tokenizer = AutoTokenizer.from_pretrained(plain_chat_model)
    tokenizer.pad_token = None
    model = AutoModelForCausalLM.from_pretrained(plain_chat_model)
    model.config.pad_token_id = None
    model.generation_config.pad_token_id = None
    for part in (tokenizer, model):
        part.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).pad_token is None
    return folder


@pytest.mark.parametrize("packing", [False, True])
def test_chats_train_and_the_checkpoint_names_no_padding_either(
    chat_recipe: MakeRecipe, unpadded: Path, tmp_path: Path, train: Train, packing: bool
) -> None:
    assert train(chat_recipe(model=str(unpadded), data={"packing": packing})) == 0
    out = tmp_path / "out"
    assert AutoTokenizer.from_pretrained(out).pad_token is None
    model = AutoModelForCausalLM.from_pretrained(out)
    assert (model.config.pad_token_id, model.generation_config.pad_token_id) == (None, None)


@pytest.mark.parametrize("packing", [False, True])
def test_padding_is_masked_and_an_end_of_text_is_learnt(
    chat_recipe: MakeRecipe, unpadded: Path, packing: bool
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(unpadded)
    end = tokenizer.eos_token_id
    assert padding_id(tokenizer) == end
    collate = chat_collator(load_recipe(chat_recipe(data={"packing": packing})), tokenizer)
    chats = [[5, 6, 7, end], [8, end]]
    rows = [{"input_ids": ids, "labels": [IGNORED, *ids[1:]]} for ids in chats]
    if packing:
        rows = [{**row, "position_ids": list(range(len(row["labels"])))} for row in rows]
    batch = collate(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, end], [8, end, end, end]]
    assert batch["labels"].tolist() == [[IGNORED, 6, 7, end], [IGNORED, end, IGNORED, IGNORED]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_classifiers_get_one_because_they_are_served_in_batches(
    make_recipe: MakeRecipe, unpadded: Path, tmp_path: Path, train: Train
) -> None:
    table = tmp_path / "reviews.tsv"
    lines = [f"{word} {'film ' * (n % 4)}\t{word}" for n in range(8) for word in ("good", "bad")]
    table.write_text("\n".join(["text\tlabel", *lines]) + "\n", encoding="utf-8")
    recipe = make_recipe(
        config=BERT,
        tokenizer={"path": str(unpadded)},
        data={"format": "labelled", "files": [str(table)], "sequence_length": 32},
        exit_layers=[1],
    )
    assert train(recipe) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.pad_token == tokenizer.eos_token
