"""Held-out text for evaluation and calibration: a file, its documents, windows of tokens.

    documents = read_documents(path)
    windows = windows_of(documents, load_tokenizer(model), length=256, limit=64, seed=0)
    for window in windows:
        reference.trace(window.token_ids, prompt_tokens, policy)

A window stands for a request: a piece of text whose first tokens are the prompt, and the others
what is generated. All windows have the same length.
"""

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
    """The texts of a file, and which file it was."""

    name: str
    """File name, without its folder."""
    sha256: str
    """Hash of the file's bytes, in hexadecimal."""
    num_bytes: int
    texts: tuple[str, ...]
    """In the order of the file; none is blank."""
    running: bool
    """Whether neighbours are parts of one text (blocks of a text file), so that short ones may
    be joined; rows of a `.jsonl` are unrelated."""

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
    """Begins with the beginning-of-text token where the tokenizer puts one before prompts."""
    document: int
    """Index of its document in `Documents.texts`; the first one, where several were joined."""


def read_documents(path: Path | str) -> Documents:
    """Reads a file of text, or a `.jsonl` with a `text` on each line.

    In a text file blank lines separate documents (paragraphs, functions).

    Raises:
        ExitServeError: there is no such file, it is not UTF-8, has no text, or a line of a
            `.jsonl` is malformed.
    """
    file = Path(path)
    content = read_text(file)
    rows = file.suffix == ".jsonl"
    found = texts_of_rows(content, file) if rows else iter(_BLANK_LINES.split(content))
    texts = tuple(text.strip("\n") for text in found if text.strip())
    if not texts:
        raise ExitServeError(f"'{file}' holds no text; give a file that does.")
    raw = file.read_bytes()
    return Documents(
        name=file.name,
        sha256=hashlib.sha256(raw).hexdigest(),
        num_bytes=len(raw),
        texts=texts,
        running=not rows,
    )


def read_text(file: Path) -> str:
    """The text of a file, with "\\n" at the ends of its lines.

    Raises:
        ExitServeError: it cannot be read, or is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ExitServeError(f"cannot read the text file '{file}': {reason}.") from error
    except UnicodeDecodeError as error:
        raise ExitServeError(f"'{file}' is not UTF-8 text ({error}); convert it.") from error


def json_rows(content: str, file: Path) -> Iterator[tuple[str, Any]]:
    """The values of a text of JSON lines, each with the place of its line, for messages.

    Raises:
        ExitServeError: a line is not valid JSON.
    """
    # Not `splitlines`: JSON strings may contain Unicode's line separators.
    for number, line in enumerate(content.split("\n"), start=1):
        where = f"line {number} of '{file}'"
        if not line.strip():
            continue
        try:
            yield where, json.loads(line)
        except json.JSONDecodeError as error:
            raise ExitServeError(f"{where} is not valid JSON: {error}.") from error


def texts_of_rows(content: str, file: Path) -> Iterator[str]:
    """The `text` of each JSON line.

    Raises:
        ExitServeError: a line has none.
    """
    for where, row in json_rows(content, file):
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise ExitServeError(f'{where} has no text; each line is {{"text": "..."}}.')
        yield text


def load_tokenizer(model: Path | str, fix: str = "save the model's own into it") -> Any:
    """The checkpoint's tokenizer.

    Args:
        model: directory of the checkpoint.
        fix: what a user should do without one, for the message.

    Raises:
        ExitServeError: there is none, or it does not load.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(model))
    except (OSError, ValueError, KeyError) as error:
        raise ExitServeError(
            f"'{model}' has no tokenizer that loads ({type(error).__name__}); {fix}."
        ) from error


def windows_of(
    documents: Documents, tokenizer: Any, length: int, limit: int, seed: int
) -> list[Window]:
    """Cuts documents into windows of `length` tokens, at least 2, that do not overlap.

    Of more than `limit` windows some are drawn; they stay in the order of the file. Blocks of
    running text that are shorter than a window are joined with those that follow. What remains at
    the end of a document is not used.

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
    """The tokens that the tokenizer puts before a prompt: beginning of text, or none."""
    bos = tokenizer.bos_token_id
    ids = tokenizer("a").input_ids
    return (bos,) if bos is not None and ids and ids[0] == bos else ()


def _passages(documents: Documents, tokenizer: Any, length: int) -> Iterator[tuple[int, list[int]]]:
    """Yields (index of its first document, token ids) of each text to cut into windows."""

    def encode(text: str) -> list[int]:
        # verbose=False: no warning about texts longer than the context, which are cut here.
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
            # Joined text may have fewer tokens, where a token spans the join.
            count = len(ids)
            if count >= length:
                yield first, ids
                joined, count = [], 0
    if joined:
        yield first, encode(BETWEEN_BLOCKS.join(joined))
