"""The text of a calibration: spread over documents, in three parts, enough of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitserve.calibration.outcomes import Piece
from exitserve.calibration.pieces import (
    PieceSplit,
    check_enough,
    independent_windows,
    model_continuations,
    split_pieces,
)
from exitserve.errors import ExitServeError
from exitserve.reference import load_reference
from exitserve.windows import Window


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 40), st.integers(0, 9))
def test_one_window_of_each_document_or_any_of_one_text(
    documents: list[int], count: int, seed: int
) -> None:
    windows = [Window((index,), document) for index, document in enumerate(documents)]
    rows = independent_windows(windows, count, seed, running=False)
    assert len(rows) == len({one.document for one in rows}) == min(count, len(set(documents)))
    text = independent_windows(windows, count, seed, running=True)
    assert len(text) == len(set(text)) == min(count, len(windows))


def pieces(text: int, generated: int) -> list[Piece]:
    return [
        *(Piece((index,), 1, "text") for index in range(text)),
        *(Piece((-index,), 1, "generated") for index in range(1, generated + 1)),
    ]


@given(st.integers(0, 60), st.integers(0, 60))
def test_no_piece_is_in_two_parts_and_each_has_both_sources(text: int, generated: int) -> None:
    parts = split_pieces(pieces(text, generated))
    every = [*parts.count, *parts.select, *parts.test]
    assert len(every) == len(set(every)) == text + generated
    for source, count in (("text", text), ("generated", generated)):
        tested = sum(one.source == source for one in parts.test)
        assert tested >= 0.7 * count - 1


BOTH = ("text", "generated")


def test_too_little_text_says_how_much_is_needed() -> None:
    def check(parts: PieceSplit, sources=BOTH) -> None:
        check_enough(parts, sources, 300, "held-out.txt", "agreement>=0.99")

    with pytest.raises(
        ExitServeError, match=r"of held-out text: 70\) .* at least 300 .* text for 429 "
    ):
        check(split_pieces(pieces(100, 1000)))
    with pytest.raises(ExitServeError, match="continuation: 70"):
        check(split_pieces(pieces(1000, 100)))
    with pytest.raises(ExitServeError, match="continuation: 0"):
        check(split_pieces(pieces(1000, 0)))
    with pytest.raises(ExitServeError, match="text: 300"):
        check(PieceSplit([], [], pieces(300, 0)), ("text",))  # nothing to choose by
    check(split_pieces(pieces(500, 0)), ("text",))


def test_what_the_model_writes_follows_its_prompts(make_checkpoint) -> None:
    reference = load_reference(str(make_checkpoint("llama")))
    prompts = [(5, 6, 7 + index) for index in range(40)]
    done: list[int] = []
    found = model_continuations(reference, prompts, 20, 1.0, 0, done.append)
    assert sum(done) == 40
    assert {one.token_ids[:3] for one in found} <= set(prompts)
    assert all(one.prompt_length == 3 and one.source == "generated" for one in found)
    assert all(8 <= len(one.token_ids) - 3 <= 20 for one in found)
    assert len({one.token_ids[3:] for one in found}) > 30, "sampled, not greedy"
    assert found == model_continuations(reference, prompts, 20, 1.0, 0, done.append), (
        "the seed decides"
    )
