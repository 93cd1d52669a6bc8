"""Chats that share a sequence: each sees itself alone, and learns what it would alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict

from exitserve.checkpoint.decoder import FAMILIES
from exitserve_training.chats import PackedChats, packed_chats
from exitserve_training.forward import ExitPass
from exitserve_training.losses.tokens import IGNORED
from exitserve_training.packing import load_packed

from .passes import random_ids, wrap

MakeRecipe = Callable[..., Path]
Train = Callable[..., int]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_chats_learn_what_they_would_alone(load: Callable[[str], Any], family: str) -> None:
    """Two sequences of 18 and 12 tokens, with padding; the second half of each chat is learnt."""
    model = load(family)
    wrap(model)
    chats = [random_ids(1, length, seed=length)[0].tolist() for length in (5, 6, 7, 12)]
    labels = [[IGNORED] * (len(ids) // 2) + ids[len(ids) // 2 :] for ids in chats]
    rows = Dataset.from_dict({"input_ids": chats, "labels": labels})
    packed = packed_chats(DatasetDict(train=rows), 18)["train"]
    assert sorted(len(row["input_ids"]) for row in packed) == [12, 18]
    loss, _ = model(**PackedChats(0, multiple_of=5)(list(packed)), exit_pass=ExitPass(0))
    total, count = torch.zeros(()), 0
    for ids, own in zip(chats, labels, strict=True):
        alone = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([own])}
        learnt = sum(label != IGNORED for label in own)
        total = total + learnt * model(**alone, exit_pass=ExitPass(0))[0]
        count += learnt
    # Products of other shapes, in float32.
    torch.testing.assert_close(loss, total / count, rtol=1e-5, atol=1e-5)


def test_the_first_token_of_a_chat_is_not_learnt_from_the_end_of_another() -> None:
    rows = Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9]], "labels": [[5, 6, 7], [8, 9]]})
    (packed,) = packed_chats(DatasetDict(train=rows), 8)["train"]
    batch = PackedChats(pad_id=1)([packed, packed])
    assert batch["labels"].tolist() == [[IGNORED, 6, 7, IGNORED, 9]] * 2
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]] * 2


def test_a_run_packs_and_learns_the_same_tokens(
    chat_recipe: MakeRecipe, tmp_path: Path, train: Train
) -> None:
    reports, rows = [], []
    for packing in (False, True):
        recipe = chat_recipe(data={"packing": packing, "sequence_length": 128, "loss_on": "all"})
        out = tmp_path / f"out-{packing}"
        assert train(recipe, f"output_dir={out}", "training.learning_rate=1e-2") == 0
        reports.append(json.loads((out / "report.json").read_text(encoding="utf-8")))
        data = load_packed(out / "data", (out / "data" / "key").read_text(encoding="utf-8"))
        assert data is not None
        rows.append(len(data["train"]))
    alone, packed = reports
    assert packed["train_tokens"] == alone["train_tokens"]
    assert rows == [24, rows[1]] and rows[1] <= 12
    assert packed["initial_layers"]["4"]["loss"] == pytest.approx(
        alone["initial_layers"]["4"]["loss"], rel=1e-5
    )
    # Four sequences a step are more chats when they are packed.
    assert packed["tokens_seen"] > alone["tokens_seen"]
    assert packed["last_layer"]["loss"] < packed["initial_layers"]["4"]["loss"]
