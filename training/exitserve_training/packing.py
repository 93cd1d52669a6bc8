"""Packing: documents become one stream of tokens, cut into sequences of equal length."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from exitserve.errors import ExitServeError
from exitserve.reporting.progress import counted
from exitserve.windows import load_tokenizer
from exitserve_training.data_recipe import DocumentEnd
from exitserve_training.sources import Document, Split

_BATCH = 256
"""Documents per tokenizer call: the library works through a batch with all cores."""

_BATCH_CHARACTERS = 2**20
"""A call with more text ends sooner: what the library keeps of it is a hundred times as large."""

TRAIN_FILE = "train.arrow"
"""The sequences of a text that does not fit into memory, some held-out ones behind them."""

_Ids = np.ndarray[Any, np.dtype[np.int32]]


def pack(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    document_end: DocumentEnd = "eos",
) -> datasets.Dataset:
    """Returns sequences `input_ids` [length]: all documents, one after the other, then cut.

    The last incomplete sequence is dropped. Attention crosses document borders inside a
    sequence, as in most pretraining; the eos before a document marks the border.
    """
    shown = counted(documents, "tokenising")
    blocks = list(sequences(shown, tokenizer, length, document_end))
    rows = [row for block in blocks for row in block]
    return datasets.Dataset.from_dict({"input_ids": rows})


def sequences(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    document_end: DocumentEnd,
) -> Iterator[_Ids]:
    """Sequences [n, length] as documents come; holds no more than a batch of them."""
    has_end = document_end == "eos" and tokenizer.eos_token_id is not None
    eos = [tokenizer.eos_token_id] if has_end else []
    left: _Ids = np.zeros(0, dtype=np.int32)
    for batch in _batches(documents):
        texts = [document.text for document in batch]
        encoded = _token_ids(tokenizer, texts)
        pieces = [left]
        for document, ids in zip(batch, encoded, strict=True):
            pieces.append(np.asarray(ids + ([] if document.is_continued else eos), dtype=np.int32))
        stream = np.concatenate(pieces)
        whole = len(stream) // length * length
        left = stream[whole:]
        if whole:
            yield stream[:whole].reshape(-1, length)


def _token_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """The tokens of each text, without any that are added."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        encoded: Any = tokenizer(texts, add_special_tokens=False, verbose=False)
        return list(encoded["input_ids"])
    # Two thirds of the time: transformers also asks for offsets, masks and types, as lists.
    backend.no_truncation()
    backend.no_padding()
    return [text.ids for text in backend.encode_batch_fast(texts, add_special_tokens=False)]


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if len(batch) == _BATCH or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def pack_split(
    split: Split,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    validation_blocks: int,
    document_end: DocumentEnd = "eos",
) -> datasets.DatasetDict:
    """Packs both sides; validation keeps at most `validation_blocks` sequences.

    Raises:
        ExitServeError: a side has less text than one sequence.
    """
    packed = datasets.DatasetDict(
        train=pack(split.train, tokenizer, length, document_end),
        validation=pack(split.validation, tokenizer, length, document_end),
    )
    check_sides(packed, length)
    held_out, every = len(split.validation), len(split.train) + len(split.validation)
    print(f"Held out: {held_out:,} of {every:,} documents.")
    packed["validation"] = spread_over(packed["validation"], validation_blocks)
    return packed


def check_sides(packed: datasets.DatasetDict, length: int) -> None:
    """Raises `ExitServeError` where a side has no sequence."""
    for side, rows in packed.items():
        if len(rows) == 0:
            raise ExitServeError(
                f"the {side} documents have fewer than data.sequence_length={length} tokens; "
                f"give more data, a shorter sequence, another data.validation_fraction (whole "
                f"documents are held out), or data.validation_files."
            )


def spread_over(held_out: datasets.Dataset, most: int) -> datasets.Dataset:
    """At most so many sequences, evenly spread: the first would be a few long documents only."""
    keep = np.linspace(0, len(held_out) - 1, min(most, len(held_out))).round()
    return held_out.select(keep.astype(int).tolist()).flatten_indices(keep_in_memory=True)


def fingerprint(*parts: str) -> str:
    """A short name for what the packed data depend on."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def load_packed(folder: Path, key: str) -> datasets.DatasetDict | None:
    """Returns the data packed earlier under the same key, or None."""
    marker = folder / "key"
    if not marker.is_file() or marker.read_text(encoding="utf-8") != key:
        return None
    in_order = folder / key / TRAIN_FILE
    if in_order.is_file():
        rows = int((folder / key / "rows").read_text(encoding="utf-8"))
        train = datasets.Dataset.from_file(str(in_order)).select(range(rows))
        held_out = datasets.Dataset.load_from_disk(str(folder / key / "validation"))
        return datasets.DatasetDict(train=train, validation=held_out)
    packed: datasets.DatasetDict = datasets.load_from_disk(str(folder / key))
    return packed


def save_packed(folder: Path, key: str, packed: datasets.DatasetDict, scratch: Path) -> None:
    """Keeps the packed data, so that a resumed run sees the same sequences in the same order.

    Args:
        folder: the run's, for data.
        key: what the data depend on.
        packed: both sides.
        scratch: has the `TRAIN_FILE` of `streamed.pack_in_order`, if that packed them.
    """
    own = folder / key
    if (scratch / TRAIN_FILE).is_file():
        own.mkdir(parents=True)
        shutil.move(scratch / TRAIN_FILE, own / TRAIN_FILE)
        (own / "rows").write_text(str(len(packed["train"])), encoding="utf-8")
        packed["validation"].save_to_disk(str(own / "validation"))
    else:
        packed.save_to_disk(str(own))
    (folder / "key").write_text(key, encoding="utf-8")


def packed_by_run(
    run: str, tokenizer: PreTrainedTokenizerBase, length: int
) -> datasets.DatasetDict:
    """The sequences of an earlier run, on both sides as they were.

    Where a text came from may have changed since, and its documents would be split anew: what
    that run trained on could be held out now.

    Raises:
        ExitServeError: no run, or sequences of another length or tokenizer.
    """
    folder = Path(run) / "data"
    marker = folder / "key"
    if not marker.is_file():
        raise ExitServeError(
            f"data.from_run: '{run}' holds no packed data (no data/key); give the output_dir of a "
            f"run on text, with its data folder."
        )
    packed = load_packed(folder, marker.read_text(encoding="utf-8"))
    assert packed is not None
    found = len(packed["train"][0]["input_ids"])
    if found != length:
        raise ExitServeError(
            f"data.from_run: '{run}' has sequences of {found} tokens; set "
            f"data.sequence_length={found} instead of {length}."
        )
    if load_tokenizer(str(folder)).get_vocab() != tokenizer.get_vocab():
        raise ExitServeError(
            f"data.from_run: '{run}' was packed with another tokenizer; give the model or "
            f"tokenizer.path that it had."
        )
    return packed
