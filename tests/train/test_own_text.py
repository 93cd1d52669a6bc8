"""`data.own_text`: training on what the model writes itself."""

from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM

from exitserve.errors import ExitServeError
from exitserve_training.recipe import load_recipe

MakeRecipe = Callable[..., Path]
Train = Callable[..., int]
OWN = {"sequences": 5, "prompt_tokens": 8, "temperature": 0.0}
LENGTH = 24


def data_of(run: Path) -> datasets.DatasetDict:
    """The sequences that a run trained on."""
    key = (run / "data" / "key").read_text(encoding="utf-8")
    found: datasets.DatasetDict = datasets.load_from_disk(str(run / "data" / key))
    return found


def test_sequences_are_continued_by_the_model(
    tmp_path: Path,
    make_checkpoint: Callable[..., Path],
    make_recipe: MakeRecipe,
    text_file: Path,
    train: Train,
) -> None:
    model_dir, runs = make_checkpoint("llama"), {}
    for name, own in (("plain", None), ("own", OWN)):
        data = {"files": [str(text_file)], "sequence_length": LENGTH, "validation_blocks": 4}
        recipe = make_recipe(
            model=str(model_dir),
            config=None,
            tokenizer=None,
            output_dir=str(tmp_path / name),
            data=data | ({} if own is None else {"own_text": own}),
            exit_layers=[1],
            objectives=["aligned", "kl_to_last"],
        )
        assert train(recipe) == 0
        runs[name] = data_of(tmp_path / name)
    assert runs["own"]["validation"]["input_ids"] == runs["plain"]["validation"]["input_ids"]
    written = runs["own"]["train"]["input_ids"]
    assert len(written) == OWN["sequences"]
    begin = int(OWN["prompt_tokens"])
    known = [row[:begin] for row in runs["plain"]["train"]["input_ids"]]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for row in written:
        assert len(row) == LENGTH
        assert row[:begin] in known
        with torch.no_grad():
            logits = model(torch.tensor([row])).logits[0, begin - 1 : -1]
        chosen = logits.gather(-1, torch.tensor(row[begin:])[:, None])[:, 0]
        # Nothing is more likely than what was written, but for bfloat16, which has three digits.
        assert (logits.amax(-1) - chosen).max() < 0.05


def test_sequences_longer_than_the_context_are_refused_before_anything_starts(
    make_checkpoint: Callable[..., Path], make_recipe: MakeRecipe, text_file: Path, train: Train
) -> None:
    data = {"files": [str(text_file)], "sequence_length": 300, "own_text": OWN}
    model = str(make_checkpoint("llama"))
    with pytest.raises(ExitServeError, match="longer than the model's context of 256 tokens"):
        train(make_recipe(model=model, config=None, tokenizer=None, data=data, exit_layers=[1]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.own_text={sequences: 0}"], "greater than or equal to 1"),
        (["data.own_text={sequences: 2, prompt_tokens: 32}"], "leaves nothing to write"),
        (["data.own_text={sequences: 2, prompt_tokens: 8}"], "a trained model writes; give model"),
        (["data.own_text={sequences: 2, prompt_tokens: 8}", "data.format=chat"], "no effect with"),
    ],
)
def test_what_cannot_be_written(
    make_recipe: MakeRecipe, overrides: list[str], message: str
) -> None:
    with pytest.raises(ExitServeError, match=message):
        load_recipe(make_recipe(), overrides)
