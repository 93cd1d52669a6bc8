import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitserve.errors import ExitServeError
from exitserve.windows import Documents, load_tokenizer, read_documents, windows_of


class OneTokenPerCharacter:
    """As much of a tokenizer as windows need; `bos` is what it puts before a prompt."""

    def __init__(self, bos: int | None = None) -> None:
        self.bos_token_id = bos

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> Any:
        start = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []

        class Encoded:
            input_ids = start + [ord(character) for character in text]

        return Encoded()


def documents(*texts: str, running: bool = False) -> Documents:
    return Documents(name="a.txt", sha256="", num_bytes=0, texts=texts, running=running)


def text_of(token_ids: tuple[int, ...]) -> str:
    return "".join(map(chr, token_ids))


def test_blank_lines_separate_documents(tmp_path: Path) -> None:
    file = tmp_path / "some.txt"
    raw = b"one\r\nstill one\r\n\r\n  \r\n    indented two\n\n\n\nthree\n"
    file.write_bytes(raw)
    found = read_documents(file)
    assert found.texts == ("one\nstill one", "    indented two", "three")
    assert found.running
    assert found.provenance() == {
        "name": "some.txt",
        "sha256": hashlib.sha256(raw).hexdigest(),
        "bytes": len(raw),
        "documents": 3,
    }


def test_rows_of_jsonl_are_documents_blank_lines_and_all(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    texts = ["one\n\nstill one", "two\u2028with a separator"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    file.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    found = read_documents(file)
    assert found.texts == tuple(texts)
    assert not found.running


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.txt", b" \n\n ", "holds no text"),
        ("a.txt", b"\xff\xfe\xfa", "UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text"', "line 2 of .* not valid JSON"),
        ("a.jsonl", b'{"body": "a"}', 'line 1 of .* has no text; each line is {"text"'),
        ("a.jsonl", b'["a"]', "line 1 of .* has no text"),
    ],
)
def test_bad_files_are_told_in_one_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ExitServeError, match=message) as error:
        read_documents(tmp_path / name)
    assert "\n" not in str(error.value)


@given(
    texts=st.lists(st.text("abc", min_size=1, max_size=40), min_size=1, max_size=8),
    length=st.integers(2, 12),
    limit=st.integers(1, 6),
    seed=st.integers(0, 5),
    bos=st.sampled_from([None, 1]),
)
def test_windows_are_pieces_of_their_documents(
    texts: list[str], length: int, limit: int, seed: int, bos: int | None
) -> None:
    source = documents(*texts)
    body = length - (bos is not None)
    whole = sum(len(text) // body for text in texts)
    if not whole:
        with pytest.raises(ExitServeError, match=f"needs {length} tokens"):
            windows_of(source, OneTokenPerCharacter(bos), length, limit, seed)
        return
    windows = windows_of(source, OneTokenPerCharacter(bos), length, limit, seed)
    assert len(windows) == min(limit, whole)
    assert windows == windows_of(source, OneTokenPerCharacter(bos), length, limit, seed)
    assert [w.document for w in windows] == sorted(w.document for w in windows)
    for window in windows:
        assert len(window.token_ids) == length
        ids = window.token_ids if bos is None else window.token_ids[1:]
        assert bos is None or window.token_ids[0] == bos
        assert text_of(ids) in texts[window.document]


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ExitServeError, match="has no tokenizer that loads"):
        load_tokenizer(tmp_path)
