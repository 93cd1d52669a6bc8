"""Documents in their source's order: what is packed, what is held out, and how much memory."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerBase

from exitserve_training import sources
from exitserve_training.packing import load_packed
from exitserve_training.recipe import DataRecipe
from exitserve_training.streamed import ordered_documents, pack_in_order
from exitserve_training.tokenization import train_bpe

LINES = [f"paragraph {number} says value_{number} = {number * 7}\n" for number in range(200)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_bpe(LINES, vocab_size=300, max_length=64)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of three splits, as a hub id would be, with a column beside the text."""
    folder = tmp_path_factory.mktemp("hub") / "lines"
    folder.mkdir()
    for split, lines in {"train": LINES, "validation": LINES[:40], "test": LINES[150:]}.items():
        rows = [json.dumps({"id": n, "text": line}) for n, line in enumerate(lines)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return folder


def text_of(rows: datasets.Dataset, tokenizer: Any) -> str:
    return str(tokenizer.decode([token for row in rows["input_ids"] for token in row]))


def packed(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, **keys: Any) -> datasets.DatasetDict:
    recipe = DataRecipe(order="source", sequence_length=16, **keys)
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    return pack_in_order(recipe, tokenizer, scratch)


@pytest.mark.parametrize("document_end", ["eos", "none"])
def test_rows_are_packed_in_their_order(
    tmp_path: Path, hub: Path, tokenizer: PreTrainedTokenizerBase, document_end: str
) -> None:
    sides = packed(
        tmp_path,
        tokenizer,
        dataset=str(hub),
        split="train",
        validation_split="test",
        document_end=document_end,
    )
    end = str(tokenizer.eos_token) if document_end == "eos" else ""
    for side, lines in (("train", LINES), ("validation", LINES[150:])):
        whole = "".join(line + end for line in lines)
        found = text_of(sides[side], tokenizer)
        assert whole.startswith(found)
        # What is cut off at the end is shorter than a sequence.
        assert len(tokenizer(whole[len(found) :], add_special_tokens=False)["input_ids"]) < 16


def test_a_text_file_has_the_tokens_of_the_whole(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PIECE", 50)
    text = "".join(line + "\n\n  indented\n" * (n % 3 == 0) for n, line in enumerate(LINES))
    (tmp_path / "whole.txt").write_text(text + "a" * 200, encoding="utf-8")
    recipe = DataRecipe(order="source", files=[str(tmp_path / "whole.txt")], sequence_length=16)
    pieces = list(ordered_documents(recipe))
    assert len(pieces) > 50
    assert "".join(piece.text for piece in pieces) == text + "a" * 200
    assert [piece.is_continued for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    sides = packed(tmp_path, tokenizer, files=recipe.files, validation_fraction=0.01)
    tokens = [token for side in sides.values() for row in side["input_ids"] for token in row]
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokens[: len(whole)] == whole[: len(tokens)]


def test_reading_ends_at_max_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        column_names = None

        def __iter__(self) -> Iterator[dict[str, str]]:
            return itertools.repeat({"text": "a" * 90})

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: Endless())
    recipe = DataRecipe(dataset="crawl", order="source", max_bytes=1000)
    assert sum(len(document.text) for document in ordered_documents(recipe)) == 990


def test_a_run_trains_on_documents_in_order_and_resumes(
    make_recipe: Callable[..., Path], tmp_path: Path, hub: Path, train: Callable[..., int]
) -> None:
    recipe = make_recipe(
        data={
            "dataset": str(hub),
            "split": "train",
            "validation_split": "test",
            "order": "source",
            "sequence_length": 32,
        }
    )
    assert train(recipe, "training.save_steps=2") == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    folder = tmp_path / "out" / "data"
    rows = load_packed(folder, (folder / "key").read_text(encoding="utf-8"))
    assert rows is not None
    assert report["train_tokens"] == len(rows["train"]) * 31
    assert train(recipe, "resume=true", "training.max_steps=5") == 0


BYTES_AS_TOKENS = """
import resource, sys, tempfile
from pathlib import Path
from exitserve_training.data_recipe import DataRecipe
from exitserve_training.streamed import pack_in_order

class Tokenizer:
    eos_token_id = 0
    def __call__(self, texts, **_):
        return {"input_ids": [list(text.encode()) for text in texts]}

def peak(file):
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
        recipe = DataRecipe(files=[file], order="source", sequence_length=512)
        rows = sum(map(len, pack_in_order(recipe, Tokenizer(), Path(folder)).values()))
    # In KiB.
    return rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

print(*peak(sys.argv[2]), *peak(sys.argv[3]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units")
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """48 MB, whose tokens alone would be 192 MB, after 4 MB."""
    small, large = tmp_path / "small.txt", tmp_path / "large.txt"
    line = "all work and no play makes the reader wait for more\n"
    small.write_text(line * (4 * 2**20 // len(line)), encoding="utf-8")
    large.write_text(line * (48 * 2**20 // len(line)), encoding="utf-8")
    command = [sys.executable, "-c", BYTES_AS_TOKENS, str(tmp_path), str(small), str(large)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    _, before, rows, after = map(int, done.stdout.split())
    assert rows > 90_000
    # The file that is mapped counts as memory while it is read: 128 sequences of it are.
    assert after - before < 40 * 1024
