"""Packing: documents become one stream of tokens, cut into sequences of equal length."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import datasets
import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from exitserve.errors import ExitServeError
from exitserve_training.sources import Document, Split
from exitserve_training.tokenization import load_tokenizer

_BATCH = 256
"""Documents per tokenizer call: the library works through a batch with all cores."""


def pack(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, length: int
) -> datasets.Dataset:
    """Returns sequences `input_ids` [length]: all documents, each ended by eos, then cut.

    The last incomplete sequence is dropped. Attention crosses document borders inside a
    sequence, as in most pretraining; the eos before a document marks the border.
    """
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    pieces = []
    # disable=None: no bar where the output is not a terminal.
    for start in tqdm(range(0, len(documents), _BATCH), desc="tokenising", disable=None):
        texts = [document.text for document in documents[start : start + _BATCH]]
        for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
            pieces.append(np.asarray(ids + eos, dtype=np.int32))
    stream = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)
    blocks = len(stream) // length
    table = stream[: blocks * length].reshape(blocks, length)
    return datasets.Dataset.from_dict({"input_ids": list(table)})


def pack_split(
    split: Split, tokenizer: PreTrainedTokenizerBase, length: int, validation_blocks: int
) -> datasets.DatasetDict:
    """Packs both sides; validation keeps at most `validation_blocks` sequences.

    Raises:
        ExitServeError: a side has less text than one sequence.
    """
    packed = datasets.DatasetDict(
        train=pack(split.train, tokenizer, length),
        validation=pack(split.validation, tokenizer, length),
    )
    for side, rows in packed.items():
        if len(rows) == 0:
            raise ExitServeError(
                f"the {side} documents have fewer than data.sequence_length={length} tokens; "
                f"give more data, a shorter sequence, or another data.validation_fraction."
            )
    held_out = packed["validation"]
    # Evenly spread: the first sequences would be a few long documents only.
    keep = np.linspace(0, len(held_out) - 1, min(validation_blocks, len(held_out))).round()
    packed["validation"] = held_out.select(keep.astype(int).tolist()).flatten_indices()
    return packed


def fingerprint(*parts: str) -> str:
    """A short name for what the packed data depend on."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def load_packed(folder: Path, key: str) -> datasets.DatasetDict | None:
    """Returns the data packed earlier under the same key, or None."""
    marker = folder / "key"
    if not marker.is_file() or marker.read_text(encoding="utf-8") != key:
        return None
    packed: datasets.DatasetDict = datasets.load_from_disk(str(folder / key))
    return packed


def save_packed(folder: Path, key: str, packed: datasets.DatasetDict) -> None:
    """Keeps the packed data, so that a resumed run sees the same sequences in the same order."""
    packed.save_to_disk(str(folder / key))
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
