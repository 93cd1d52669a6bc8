"""Held-out text for evaluation and calibration: a file, its documents, windows of tokens.

    documents = read_documents(path)
    windows = windows_of(documents, load_tokenizer(model), length=256, limit=64, seed=0)
    for window in windows:
        reference.trace(window.token_ids, prompt_tokens, policy)

A window is what one request would be: a piece of running text, of which the first tokens are taken
for the prompt and the others for what is generated. All windows are of one length.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exitserve.errors import ExitServeError

BETWEEN_BLOCKS = "\n\n"
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")


@dataclass(frozen=True, kw_only=True)
class Documents:
    """What a file holds, and which file it was."""

    name: str
    """Of the file, without its folder."""
    sha256: str
    """Of the file's bytes, in hexadecimal."""
    num_bytes: int
    texts: tuple[str, ...]
    """None of them blank, in the order of the file."""
    running: bool
    """Whether neighbours are parts of one text (blocks of a text file), so that short ones may
    be joined again; rows of a `.jsonl` have nothing to do with each other."""

    def provenance(self) -> dict[str, Any]:
        """For reports and checkpoints: `name`, `sha256`, `bytes`, `documents`."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "bytes": self.num_bytes,
            "documents": len(self.texts),
        }


@dataclass(frozen=True)
class Window:
    """A piece of one document, or of several neighbours joined."""

    token_ids: tuple[int, ...]
    """As many as were asked for, the beginning-of-text token among them where the tokenizer
    puts one before a prompt."""
    document: int
    """Index into `Documents.texts` of where it is from; the first, where several were joined."""


def read_documents(path: Path | str) -> Documents:
    """Reads a file of text, or a `.jsonl` with a `text` on each line.

    In a text file blank lines separate documents (paragraphs, functions).

    Raises:
        ExitServeError: there is no such file, it is no UTF-8, holds no text, or a line of a
            `.jsonl` is malformed.
    """
    file = Path(path)
    try:
        raw = file.read_bytes()
        content = raw.decode("utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ExitServeError(f"cannot read the text file '{file}': {reason}.") from error
    except UnicodeDecodeError as error:
        raise ExitServeError(f"'{file}' is not UTF-8 text ({error}); convert it.") from error
    rows = file.suffix == ".jsonl"
    content = content.replace("\r\n", "\n")
    found = _rows_of(content, file) if rows else iter(_BLANK_LINES.split(content))
    texts = tuple(text.strip("\n") for text in found if text.strip())
    if not texts:
        raise ExitServeError(f"'{file}' holds no text; give a file that does.")
    return Documents(
        name=file.name,
        sha256=hashlib.sha256(raw).hexdigest(),
        num_bytes=len(raw),
        texts=texts,
        running=not rows,
    )


def _rows_of(content: str, file: Path) -> Iterator[str]:
    # Not `splitlines`: JSON may hold line separators of Unicode as they are.
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ExitServeError(
                f"line {number} of '{file}' is not valid JSON: {error}."
            ) from error
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise ExitServeError(
                f'line {number} of \'{file}\' has no text; each line is {{"text": "..."}}.'
            )
        yield text


def load_tokenizer(model: Path | str) -> Any:
    """The checkpoint's tokenizer.

    Raises:
        ExitServeError: it has none that loads.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(model))
    except (OSError, ValueError, KeyError) as error:
        raise ExitServeError(
            f"'{model}' has no tokenizer that loads; save the model's own into it."
        ) from error


def windows_of(
    documents: Documents, tokenizer: Any, length: int, limit: int, seed: int
) -> list[Window]:
    """Cuts documents into windows of `length` tokens that do not overlap.

    Where there are more than `limit`, the seed chooses; they stay in the order of the file. Blocks
    of running text that are shorter than a window are joined with those that follow. What is left
    over at the end of a document is not used.

    Args:
        documents: the text.
        tokenizer: of transformers.
        length: tokens of a window, at least 2.
        limit: most windows.
        seed: of the choice.

    Raises:
        ExitServeError: no document is long enough for one window.
    """
    start = _start_of(tokenizer)
    body = length - len(start)
    found: list[Window] = []
    longest = 0
    for index, ids in _passages(documents, tokenizer, body):
        longest = max(longest, len(ids))
        for at in range(0, len(ids) - body + 1, body):
            found.append(Window((*start, *ids[at : at + body]), index))
    if not found:
        raise ExitServeError(
            f"'{documents.name}' is too short: one window needs {length} tokens, and its longest "
            f"document has {longest + len(start)}; give more text, or a shorter window."
        )
    if len(found) > limit:
        chosen = sorted(random.Random(seed).sample(range(len(found)), limit))
        found = [found[index] for index in chosen]
    return found


def _start_of(tokenizer: Any) -> tuple[int, ...]:
    """What the tokenizer puts before a prompt: its beginning-of-text token, or nothing."""
    bos = tokenizer.bos_token_id
    ids = tokenizer("a").input_ids
    return (bos,) if bos is not None and ids and ids[0] == bos else ()


def _passages(documents: Documents, tokenizer: Any, length: int) -> Iterator[tuple[int, list[int]]]:
    """(index of its first document, token ids) of texts to cut, blocks joined up to `length`."""

    def encode(text: str) -> list[int]:
        # verbose=False: texts longer than the context are cut here, so no warning is due.
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    if not documents.running:
        for index, text in enumerate(documents.texts):
            yield index, encode(text)
        return
    first, joined, count = 0, list[str](), 0
    for index, text in enumerate(documents.texts):
        first = first if joined else index
        joined.append(text)
        count += len(encode(text))
        if count >= length:
            ids = encode(BETWEEN_BLOCKS.join(joined))
            # Joined, tokens may be fewer, where a token spans the gap.
            count = len(ids)
            if count >= length:
                yield first, ids
                joined, count = [], 0
    if joined:
        yield first, encode(BETWEEN_BLOCKS.join(joined))
