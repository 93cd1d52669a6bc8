"""Training on chats through TRL's trainer: batches, losses and steps are TRL's own."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from exitserve.checkpoint.block import MultiExit
from exitserve.checkpoint.hub import CARD
from exitserve.errors import ExitServeError
from exitserve_training.arguments import training_arguments
from exitserve_training.chats import ChatTrainer, chat_collator, load_chats
from exitserve_training.recipe import load_recipe

Train = Callable[..., int]
MakeRecipe = Callable[..., Path]
ChatRow = Callable[..., dict[str, Any]]

IGNORED = -100


def chat_trainer(path: Path, *overrides: str) -> ChatTrainer:
    """The trainer of a recipe, not yet run."""
    recipe = load_recipe(path, overrides)
    tokenizer = AutoTokenizer.from_pretrained(str(recipe.model))
    data = load_chats(recipe.data, tokenizer, recipe.seed)
    return ChatTrainer(
        model=AutoModelForCausalLM.from_pretrained(str(recipe.model)),
        recipe=recipe,
        exits=MultiExit(exit_layers=(1, 2), objective="test"),
        args=training_arguments(recipe),
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        data_collator=chat_collator(recipe, tokenizer),
    )


def trl_trainer(trainer: ChatTrainer, train_dataset: Dataset, **arguments: Any) -> SFTTrainer:
    """TRL's own trainer of the same model."""
    model = str(trainer.language_model.name_or_path)
    defaults = {
        "output_dir": str(trainer.args.output_dir),
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    return SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=SFTConfig(**{**defaults, **arguments}),
        train_dataset=train_dataset,
        processing_class=AutoTokenizer.from_pretrained(model),
    )


def batches(trainer: ChatTrainer) -> Iterator[dict[str, Any]]:
    yield from trainer.get_train_dataloader()


@pytest.mark.parametrize("length", [64, 24])
def test_tokens_and_labels_are_those_of_trl(
    chat_recipe: MakeRecipe, marked_chat_model: Path, length: int, chat_row: ChatRow
) -> None:
    """TRL templates, masks and cuts the same rows itself; 24 tokens cut, and lose, some."""
    rows = [chat_row(number, "message lists") for number in range(26)]
    trainer = chat_trainer(
        chat_recipe(rows, model=str(marked_chat_model)), f"data.sequence_length={length}"
    )
    prepared = trl_trainer(trainer, Dataset.from_list(rows), max_length=length).train_dataset
    theirs = {tuple(row["input_ids"]): tuple(row["labels"]) for row in prepared}
    for side in (trainer.train_dataset, trainer.eval_dataset):
        for row in side:
            assert theirs.pop(tuple(row["input_ids"])) == tuple(row["labels"])
    assert not theirs


def test_long_chats_are_cut_and_empty_ones_left_out(
    chat_recipe: MakeRecipe,
    tmp_path: Path,
    train: Train,
    capsys: pytest.CaptureFixture[str],
    chat_row: ChatRow,
) -> None:
    rows = [chat_row(number) for number in range(26)]
    for row in rows[::2]:
        row["messages"][0]["content"] += " Make it quick." * 10
    recipe = chat_recipe(rows, data={"sequence_length": 24})
    assert train(recipe, "training.per_device_train_batch_size=1") == 0
    printed = capsys.readouterr().out
    assert "Of 26 chats, " in printed and "…" not in printed, "tables fit 80 columns"
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert all(math.isfinite(layer["loss"]) for layer in report["layers"].values())
    trainer = chat_trainer(recipe)
    assert 10 < len(trainer.train_dataset) < 24
    for row in trainer.train_dataset:
        assert len(row["input_ids"]) <= 24
        assert any(label != IGNORED for label in row["labels"][1:])
    assert "cut at data.sequence_length=24" in capsys.readouterr().out


@pytest.mark.parametrize("loss_on", ["completion", "all"])
def test_loss_is_that_of_trl_and_of_transformers(chat_recipe: MakeRecipe, loss_on: str) -> None:
    trainer = chat_trainer(chat_recipe(objectives=["ce"], data={"loss_on": loss_on}))
    plain_trl = trl_trainer(trainer, trainer.train_dataset)
    model = AutoModelForCausalLM.from_pretrained(str(trainer.language_model.name_or_path))
    for batch in batches(trainer):
        ours = trainer.compute_loss(trainer.model, dict(batch))
        theirs = plain_trl.compute_loss(plain_trl.model, dict(batch))
        loss = model(**batch).loss
        # float32 sums over a hundred tokens, in other orders.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours, loss, rtol=1e-5, atol=1e-5)


def test_accumulated_batches_count_by_their_tokens(
    chat_recipe: MakeRecipe, tmp_path: Path, train: Train
) -> None:
    """Two halves of a batch give the step of the whole one, and of TRL's own trainer."""
    # Plain SGD: Adam would hide a wrong scale, and show rounding where gradients are tiny.
    common = {
        "max_steps": 4,
        "optim": "sgd",
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "disable_tqdm": True,
    }
    weights = []
    for size, accumulation in ((8, 1), (4, 2)):
        folder = tmp_path / f"batch-{size}"
        training = {
            **common,
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": accumulation,
        }
        recipe = chat_recipe(output_dir=str(folder), objectives=["ce"], training=training)
        assert train(recipe) == 0
        weights.append(AutoModelForCausalLM.from_pretrained(folder).state_dict())
    trainer = chat_trainer(recipe)
    plain_trl = trl_trainer(trainer, trainer.train_dataset, **training, seed=0)
    plain_trl.train()
    weights.append(plain_trl.model.state_dict())
    before = trainer.language_model.state_dict()
    for name, tensor in weights[0].items():
        assert not torch.equal(tensor, before[name])
        for other in weights[1:]:
            torch.testing.assert_close(other[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_run_leaves_an_ordinary_checkpoint(
    chat_recipe: MakeRecipe, tmp_path: Path, train: Train, bundled: Path
) -> None:
    recipe = chat_recipe(
        training={"max_steps": 6, "save_steps": 3, "learning_rate": 1e-2, "disable_tqdm": True}
    )
    assert train(recipe) == 0
    out = tmp_path / "out"
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    for depth, layer in report["layers"].items():
        assert layer["loss"] < report["initial_layers"][depth]["loss"]
    trainer = chat_trainer(recipe)
    assert report["train_tokens"] == sum(
        label != IGNORED for row in trainer.train_dataset for label in row["labels"]
    )
    # 6 steps of 8: both passes over the 24 chats, without the padding.
    assert report["tokens_seen"] == 2 * sum(len(row) for row in trainer.train_dataset["input_ids"])
    assert [*out.rglob("README.md"), *out.rglob("cache-*"), *out.rglob("tmp*")] == [out / CARD]
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(bundled).chat_template
    # Evaluation is that of plain transformers on the labelled tokens.
    model = AutoModelForCausalLM.from_pretrained(out)
    total = count = 0.0
    for row in trainer.eval_dataset:
        labels = torch.tensor([row["labels"]])
        tokens = int((labels[:, 1:] != IGNORED).sum())
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([row["input_ids"]]), labels=labels).loss
        total += loss.item() * tokens
        count += tokens
    assert report["validation_tokens"] == count
    assert report["last_layer"]["loss"] == pytest.approx(total / count, rel=1e-4)


BAD_KEYS = {
    "packing=true": "set 'data.packing' instead",
    "loss_type=dft": "the loss is that of objectives",
    "max_length=9": "set 'data.sequence_length' instead",
    "completion_only_loss=false": "set 'data.loss_on' instead",
    "label_smoothing_factor=0.1": "no objective smooths",
    "max_step=3": "unknown. Did you mean 'max_steps'",
}


@pytest.mark.parametrize("override", BAD_KEYS)
def test_keys_without_effect_are_refused(chat_recipe: MakeRecipe, override: str) -> None:
    recipe = load_recipe(chat_recipe(), [f"training.{override}"])
    with pytest.raises(ExitServeError, match=BAD_KEYS[override]) as error:
        training_arguments(recipe)
    assert "\n" not in str(error.value)


def test_chats_to_evaluate_on_are_not_trained_on(
    chat_recipe: MakeRecipe, tmp_path: Path, chat_row: ChatRow, write_rows: Callable[..., Path]
) -> None:
    held_out = write_rows(
        tmp_path / "held_out.jsonl", [chat_row(3, "texts"), chat_row(30, "texts")]
    )
    trainer = chat_trainer(chat_recipe(data={"validation_files": [str(held_out)]}))
    sides: list[Any] = [trainer.train_dataset, trainer.eval_dataset]
    train_rows, held_out_rows = ({*map(tuple, side["input_ids"])} for side in sides)
    assert (len(train_rows), len(held_out_rows)) == (25, 2)
    assert train_rows.isdisjoint(held_out_rows)
