"""Documents, their split into train and validation, the tokenizer, and packing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from exitserve.errors import ExitServeError
from exitserve_training.packing import pack, pack_split
from exitserve_training.recipe import DataRecipe
from exitserve_training.sources import Document, Split, load_split
from exitserve_training.streamed import ordered_documents
from exitserve_training.tokenization import END_OF_TEXT, train_bpe

PYTHON = "def area(width, height):\n    if width:\n        return width * height\n    return 0\n"


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([PYTHON] * 20, vocab_size=300, max_length=64)


def write(folder: Path, count: int = 20) -> None:
    for index in range(count):
        (folder / f"{index}.txt").write_text(f"document {index} " * 40, encoding="utf-8")


def test_documents_are_split_whole_and_without_leakage(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "copy.txt").write_text("document 3 " * 40, encoding="utf-8")
    recipe = DataRecipe(files=[f"{tmp_path}/*.txt"], validation_fraction=0.25)
    split = load_split(recipe, seed=0)
    train = {doc.text for doc in split.train}
    held_out = {doc.text for doc in split.validation}
    assert len(train) == 15
    assert len(held_out) == 5, "the copy counts once, so it cannot be on both sides"
    assert not train & held_out
    assert load_split(recipe, seed=0) == split
    assert load_split(recipe, seed=1) != split


def test_validation_files_are_left_out_of_training(tmp_path: Path) -> None:
    write(tmp_path, 4)
    recipe = DataRecipe(
        files=[f"{tmp_path}/*.txt"], validation_files=[f"{tmp_path}/2.txt"], sequence_length=8
    )
    split = load_split(recipe, seed=0)
    assert [doc.text for doc in split.validation] == ["document 2 " * 40]
    assert len(split.train) == 3


def test_tables_and_text_give_the_same_documents(tmp_path: Path) -> None:
    texts = [f"row {i}" for i in range(5)]
    rows = datasets.Dataset.from_dict({"body": texts, "id": list(range(5))})
    rows.to_json(str(tmp_path / "rows.jsonl"))
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    for name in ("rows.jsonl", "rows.parquet"):
        recipe = DataRecipe(files=[str(tmp_path / name)], text_field="body")
        split = load_split(recipe, seed=0)
        assert sorted(doc.text for doc in [*split.train, *split.validation]) == texts
        with pytest.raises(ExitServeError, match=r"has no column 'boddy'.*Did you mean 'body'"):
            load_split(recipe.model_copy(update={"text_field": "boddy"}), seed=0)
        with pytest.raises(ExitServeError, match="has no column 'boddy'"):
            list(ordered_documents(recipe.model_copy(update={"text_field": "boddy"})))
    marked = tmp_path / "marked.txt"
    marked.write_text("a text", encoding="utf-8-sig")
    parts = ordered_documents(DataRecipe(files=[str(marked)]))
    assert "".join(part.text for part in parts) == "a text", "what marks the encoding is no text"


def lines_of(*parts: range) -> str:
    """Lines that tell texts apart, indented so or so, and some that tell nothing."""
    told = [f"{'    ' * (i % 3)}result_{i} = compute({i})" for part in parts for i in part]
    return "\n".join([*told, *["    else:", "    return x"] * 20])


def test_near_copies_are_left_out(tmp_path: Path) -> None:
    """Of a document's telling lines so many stood in others before; held-out ones are first."""
    texts = {
        "held-out": lines_of(range(100)),
        "copies 70 of 100": lines_of(range(30, 130)),
        "copies 50 of 100": lines_of(range(50), range(200, 250)),
        "copies 60 of 100 of what was left out": lines_of(range(100, 130), range(300, 340)),
        "says nothing": "    else:\n    return x\n" * 30,
    }
    paths = {name: tmp_path / f"{number}.txt" for number, name in enumerate(texts)}
    for name, path in paths.items():
        path.write_text(texts[name], encoding="utf-8")
    names = {str(path): name for name, path in paths.items()}
    recipe = DataRecipe(
        files=[f"{tmp_path}/*.txt"], validation_files=[str(paths["held-out"])], sequence_length=8
    )
    left_out = {
        None: set(),
        0.6: {"copies 70 of 100"},
        0.3: {"copies 70 of 100", "copies 50 of 100", "copies 60 of 100 of what was left out"},
    }
    for limit, expected in left_out.items():
        split = load_split(recipe.model_copy(update={"max_repeated_lines": limit}), seed=0)
        assert [names[doc.name] for doc in split.validation] == ["held-out"]
        kept = {names[doc.name] for doc in split.train}
        assert kept == texts.keys() - expected - {"held-out"}, limit


def test_indentation_is_one_token_and_chat_is_plain(tokenizer) -> None:
    pieces = tokenizer.tokenize("\n        return width")
    assert pieces == ["Ċ", "ĠĠĠĠĠĠĠ", "Ġreturn", "Ġwidth"]
    messages = [{"role": "user", "content": "import os"}, {"role": "user", "content": "x = 1"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "import os\nx = 1\n"


def test_packing_loses_only_the_last_piece(tokenizer) -> None:
    documents = [Document(str(i), PYTHON + f"# {i}\n") for i in range(7)]
    stream = [
        token
        for doc in documents
        for token in [*tokenizer(doc.text)["input_ids"], tokenizer.eos_token_id]
    ]
    rows = pack(documents, tokenizer, 16)["input_ids"]
    assert [token for row in rows for token in row] == stream[: len(stream) // 16 * 16]
    assert tokenizer.eos_token == tokenizer.bos_token == END_OF_TEXT


def test_validation_is_spread_over_all_held_out_documents(tokenizer) -> None:
    held_out = [Document(str(i), f"value_{i} = {i}\n" * 30) for i in range(10)]
    packed = pack_split(Split(held_out, held_out), tokenizer, 16, validation_blocks=10)
    text = tokenizer.decode([i for row in packed["validation"]["input_ids"] for i in row])
    assert len(packed["validation"]) == 10
    assert "= 0\n" in text
    assert "= 9\n" in text
    with pytest.raises(ExitServeError, match="the validation documents have fewer"):
        pack_split(Split(held_out, held_out[:1]), tokenizer, 1000, 10)


def test_a_run_reads_what_an_earlier_run_has_packed(
    make_recipe: Callable[..., Path], tmp_path: Path, train: Callable[..., int], bundled: Path
) -> None:
    """Held out is what was held out then, though the files are others now."""
    texts = tmp_path / "texts"
    texts.mkdir()
    write(texts)
    keys: dict[str, Any] = {"data": {"files": [f"{texts}/*.txt"], "sequence_length": 32}}
    training = {"max_steps": 1, "per_device_train_batch_size": 2, "disable_tqdm": True}
    first, then = tmp_path / "out", tmp_path / "then"
    assert train(make_recipe(**keys, training=training)) == 0
    (texts / "0.txt").unlink()
    later = make_recipe(
        output_dir=str(then),
        model=str(first),
        config=None,
        tokenizer=None,
        training=training,
        data={"from_run": str(first), "sequence_length": 32},
    )
    assert train(later) == 0
    sides = [
        datasets.load_from_disk(str(marker.parent / marker.read_text()))
        for marker in (first / "data" / "key", then / "data" / "key")
    ]
    for side in ("train", "validation"):
        assert sides[0][side]["input_ids"][:] == sides[1][side]["input_ids"][:]
    again = [f"output_dir={tmp_path / 'again'}"]
    with pytest.raises(ExitServeError, match=r"set data\.sequence_length=32 instead of 16"):
        train(later, *again, "data.sequence_length=16")
    with pytest.raises(ExitServeError, match=r"packed with another tokenizer"):
        train(later, *again, f"tokenizer.path={bundled}")
    with pytest.raises(ExitServeError, match=r"holds no packed data"):
        train(later, *again, f"data.from_run={texts}")
    with pytest.raises(ExitServeError, match=r"data\.max_bytes has no effect with data\.from_run"):
        train(later, *again, "data.max_bytes=100")
