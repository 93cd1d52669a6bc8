"""Documents: read text, JSONL, Parquet, a `datasets` id, or this installation's Python source."""

import glob
import hashlib
import random
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import datasets

from exitserve.errors import ExitServeError, nearest
from exitserve_training.data_recipe import DataRecipe

TABLES = (".jsonl", ".json", ".parquet")
"""Files with a document in each row."""

PIECE = 64 * 1024
"""Characters of a text file that are read at once: a batch of the tokenizer's is 16 of them, each
of which one core works on."""

_TELLING_LENGTH = 12
"""Shorter lines (`else:`, `return x`) stand in any file."""


@dataclass(frozen=True)
class Document:
    """One text and the name it goes by; a document is never split between train and validation."""

    name: str
    text: str
    is_continued: bool = False
    """Whether the next one is a later part of the same text."""

    @property
    def package(self) -> str:
        """Of Python source: the top-level package."""
        return "/".join(self.name.split("/")[:2])


@dataclass(frozen=True)
class Split:
    """Documents to train on and documents held out; no text is in both."""

    train: list[Document]
    validation: list[Document]


def load_split(recipe: DataRecipe, seed: int) -> Split:
    """Reads the documents and holds some of them out.

    Documents with equal text are read once, so that a copied file cannot be on both sides. A
    single document is cut near its end, at a line break, and its tail is held out.

    Raises:
        ExitServeError: a file is missing or empty, a column is missing, or nothing is left.
    """
    documents = _distinct(list(read_documents(recipe)))
    random.Random(seed).shuffle(documents)
    in_packages = within(documents, recipe.max_package_bytes, lambda doc: doc.package)
    documents = list(within(in_packages, recipe.max_bytes))
    if not documents:
        raise ExitServeError("data gives no document; check data.files, exclude and the limits.")
    if recipe.validation_files or recipe.validation_split is not None:
        held_out = _distinct(list(read_held_out(recipe)))
        texts = {doc.text for doc in held_out}
        return _checked(recipe, [doc for doc in documents if doc.text not in texts], held_out)
    if len(documents) == 1:
        return _cut(documents[0], recipe.validation_fraction)
    count = max(1, round(len(documents) * recipe.validation_fraction))
    return _checked(recipe, documents[count:], documents[:count])


def _checked(recipe: DataRecipe, train: list[Document], validation: list[Document]) -> Split:
    if recipe.max_repeated_lines is not None:
        train = _without_near_copies(train, validation, recipe.max_repeated_lines)
    if not train:
        raise ExitServeError(
            "no document is left to train on; lower data.validation_fraction or give more data."
        )
    return Split(train, validation)


def _cut(document: Document, fraction: float) -> Split:
    """Holds out the tail of a single document."""
    text = document.text
    middle = text.rfind("\n", 0, int(len(text) * (1.0 - fraction))) + 1
    middle = middle or int(len(text) * (1.0 - fraction))
    if not 0 < middle < len(text):
        raise ExitServeError(f"'{document.name}' is too short to hold out a validation part.")
    head, tail = text[:middle], text[middle:]
    return Split([Document(document.name, head)], [Document(f"{document.name} (tail)", tail)])


def read_documents(recipe: DataRecipe, *, in_pieces: bool = False) -> Iterator[Document]:
    """All documents of a recipe that are not too long, as they come.

    Args:
        recipe: where they are.
        in_pieces: whether text files come as parts, and rows as they are read, so that little of
            them is in memory.

    Raises:
        ExitServeError: a file is missing or empty, or a column is missing.
    """
    limit = recipe.max_file_bytes
    yield from _read_files(recipe.files, recipe.text_field, limit, in_pieces)
    yield from _short(_read_dataset(recipe, recipe.dataset_split, in_pieces), limit)
    for place in recipe.python_source:
        yield from _short(python_documents(place, recipe.exclude), limit)


def read_held_out(recipe: DataRecipe, *, in_pieces: bool = False) -> Iterator[Document]:
    """What the recipe holds out by name."""
    yield from _read_files(recipe.validation_files, recipe.text_field, None, in_pieces)
    yield from _read_dataset(recipe, recipe.validation_split, in_pieces)


def _read_dataset(recipe: DataRecipe, split: str | None, streaming: bool) -> Iterator[Document]:
    """The texts of a split of the `datasets` id, where there are both."""
    if recipe.dataset is not None and split is not None:
        rows = load_dataset(recipe, split, streaming=streaming)
        yield from table_documents(rows, recipe.dataset, recipe.text_field)


def _distinct(documents: Sequence[Document]) -> list[Document]:
    seen = {hashlib.sha256(doc.text.encode()).digest(): doc for doc in reversed(documents)}
    return list(reversed(seen.values()))


def _without_near_copies(
    documents: Sequence[Document], held_out: Sequence[Document], limit: float
) -> list[Document]:
    """The documents of which at most `limit` of the lines stood in those before.

    Those held out come before all; all of them count, and none is left out. A document that is
    left out counts too: its copies are copies of what it copied.
    """
    seen: set[str] = set()
    for document in held_out:
        seen.update(_telling_lines(document.text))
    kept = []
    for document in documents:
        lines = _telling_lines(document.text)
        if sum(line in seen for line in lines) <= limit * len(lines):
            kept.append(document)
        seen.update(lines)
    return kept


def _telling_lines(text: str) -> list[str]:
    """The lines that are long enough to tell one text from another, without their indentation."""
    stripped = (line.strip() for line in text.splitlines())
    return [line for line in stripped if len(line) >= _TELLING_LENGTH]


def within(
    documents: Iterable[Document], limit: int | None, part: Callable[[Document], str] = lambda _: ""
) -> Iterator[Document]:
    """Leaves out what goes over so many bytes in all, or of each `part`."""
    used: Counter[str] = Counter()
    for document in documents:
        used[part(document)] += len(document.text.encode())
        if limit is None or used[part(document)] <= limit:
            yield document


def _short(documents: Iterator[Document], limit: int | None) -> Iterator[Document]:
    """Those of at most so many bytes."""
    return (doc for doc in documents if limit is None or len(doc.text.encode()) <= limit)


def _read_files(
    patterns: Sequence[str], text_field: str, limit: int | None, in_pieces: bool
) -> Iterator[Document]:
    for path in matching_files(patterns):
        if path.suffix in TABLES:
            documents = _short(_read_rows(path, text_field), limit)
        elif limit is not None and path.stat().st_size > limit:
            continue
        else:
            documents = _read_text(path, in_pieces)
        has_text = False
        for document in documents:
            has_text = has_text or bool(document.text.strip())
            yield document
        if not has_text and limit is None:
            raise ExitServeError(
                f"data file '{path}' has no text in it; remove it or give another."
            )


def _read_rows(path: Path, text_field: str) -> Iterator[Document]:
    kind = "parquet" if path.suffix == ".parquet" else "json"
    with names_invalid(path):
        # Streamed: a cache keyed by path would hide later changes of the file.
        rows = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
        yield from table_documents(rows, str(path), text_field)


@contextmanager
def names_invalid(path: Path) -> Iterator[None]:
    """Raises `ExitServeError` with a file's path where the block cannot read it."""
    try:
        yield
    except ExitServeError:
        raise
    except (datasets.exceptions.DatasetGenerationError, LookupError, ValueError, OSError) as error:
        raise ExitServeError(
            f"data file '{path}' is not valid {path.suffix[1:] or 'data'}."
        ) from error


def _read_text(path: Path, in_pieces: bool) -> Iterator[Document]:
    """A text file, or parts of it of about `PIECE` characters; only the last of them ends it."""
    left = ""
    try:
        with path.open(encoding="utf-8-sig") as file:
            while more := file.read(PIECE if in_pieces else -1):
                left += more
                if in_pieces:
                    cut = _cut_at(left)
                    yield Document(str(path), left[:cut], is_continued=True)
                    left = left[cut:]
    except UnicodeDecodeError as error:
        raise ExitServeError(f"data file '{path}' is not UTF-8 text: {error}.") from error
    yield Document(str(path), left)


def _cut_at(text: str) -> int:
    """Where a text can be cut so that its parts have the tokens of the whole.

    Byte-level BPEs split text into words first, and no word goes over the end of a line that
    another follows at once. Without such a place the cut is before the last space, or at the end.
    """
    at = text.rfind("\n", 0, len(text) - 1)
    while at >= 0 and text[at + 1].isspace():
        at = text.rfind("\n", 0, at)
    if at >= 0:
        return at + 1
    space = text.rfind(" ")
    return space if space > 0 else len(text)


def matching_files(patterns: Sequence[str]) -> Iterator[Path]:
    """The files that match, none of them empty."""
    for pattern in patterns:
        # Path.glob refuses absolute patterns, which are what users paste.
        found = glob.glob(pattern, recursive=True)  # noqa: PTH207
        paths = sorted(path for path in found if Path(path).is_file())
        if not paths:
            raise ExitServeError(f"no data file matches '{pattern}'; check the path or the glob.")
        for path in map(Path, paths):
            if path.stat().st_size == 0:
                raise ExitServeError(f"data file '{path}' is empty; remove it or give another.")
            yield path


def read_table(path: Path) -> datasets.Dataset:
    """Reads a .jsonl, .json or .parquet file."""
    # Kept in memory: a cache keyed by path would hide later changes of the file.
    table = datasets.Dataset
    read = table.from_parquet if path.suffix == ".parquet" else table.from_json
    with names_invalid(path):
        return read(str(path), keep_in_memory=True)


def read_tables(
    recipe: DataRecipe, patterns: Sequence[str], split: str | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of table files and of a split of the `datasets` id, with the names they go by.

    Raises:
        ExitServeError: a file is missing, empty, or no table.
    """
    for path in matching_files(patterns):
        if path.suffix not in TABLES:
            raise ExitServeError(
                f"data file '{path}' is not a table; chats come as {', '.join(sorted(TABLES))}."
            )
        for number, row in enumerate(read_table(path), start=1):
            yield f"'{path}', row {number}", row
    if recipe.dataset is not None and split is not None:
        for number, row in enumerate(load_dataset(recipe, split), start=1):
            yield f"'{recipe.dataset}', row {number}", row


def load_dataset(recipe: DataRecipe, split: str, *, streaming: bool = False) -> Any:
    """A split of the `datasets` id of a recipe; rows come as they are read if `streaming`."""
    name = str(recipe.dataset)
    try:
        return datasets.load_dataset(name, recipe.dataset_config, split=split, streaming=streaming)
    except Exception as error:  # the library raises dozens of types for a bad id
        reason = " ".join(str(error).split())[:200]
        raise ExitServeError(f"dataset {name!r} could not be loaded: {reason}") from error


def table_documents(rows: Any, name: str, text_field: str) -> Iterator[Document]:
    """The texts of a column, of rows in memory or in a stream; empty ones are left out.

    Raises:
        ExitServeError: there is no such column.
    """
    # Of some streams the columns are known by their rows only.
    if rows.column_names is not None and text_field in rows.column_names:
        rows = rows.select_columns([text_field])
    for number, row in enumerate(rows):
        if text_field not in row:
            raise ExitServeError(
                f"'{name}' has no column {text_field!r}; it has: {', '.join(row)}. "
                f"Set data.text_field.{nearest(text_field, row)}"
            )
        text = row[text_field]
        if isinstance(text, str) and text:
            yield Document(f"{name}#{number}", text)


def python_documents(place: str, exclude: Sequence[str]) -> Iterator[Document]:
    """The .py files of the standard library or of the installed packages, named from `place`."""
    paths = sysconfig.get_paths()
    root = Path(paths["stdlib" if place == "stdlib" else "purelib"])
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root).as_posix()
        # Packages are not the standard library; finders of editable installs hold local paths.
        if inside.startswith(("site-packages/", "dist-packages/", "__editable__")):
            continue
        name = f"{place}/{inside}"
        if any(fnmatch(name, pattern) for pattern in exclude):
            continue
        # The standard library's own tests hold files that are broken on purpose.
        with suppress(UnicodeDecodeError, OSError):
            text = path.read_text(encoding="utf-8-sig")
            if text.strip():
                yield Document(name, text)
