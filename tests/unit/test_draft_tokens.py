"""The tokens of a smaller head for drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from exitserve.checkpoint import draft_tokens
from exitserve.checkpoint.draft_tokens import (
    FILE,
    load_draft_tokens,
    most_frequent,
    save_draft_tokens,
)
from exitserve.errors import ExitServeError


def test_frequent_tokens_come_first_then_low_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_tokens, "ROWS", 4)
    assert most_frequent([[9, 9, 7], [9, 7, 3]], 10) == [0, 3, 7, 9]


def test_a_small_vocabulary_is_drafted_from_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_tokens, "ROWS", 4)
    assert most_frequent([[1]], 5) is None


def test_written_and_read(tmp_path: Path) -> None:
    assert load_draft_tokens(tmp_path) is None
    save_draft_tokens(tmp_path, [3, 5, 8])
    found = load_draft_tokens(tmp_path)
    assert found is not None
    assert found.tolist() == [3, 5, 8]


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    save_draft_tokens(tmp_path, [3])
    (tmp_path / FILE).write_bytes(b"no tensors")
    with pytest.raises(ExitServeError, match=r"cannot be read.*delete it, or calibrate again"):
        load_draft_tokens(tmp_path)
