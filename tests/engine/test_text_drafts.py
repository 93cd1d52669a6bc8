"""Drafts of the text, against a search token by token."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from exitserve.engine.drafting.cpu import following


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=24),
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=8),
)
def test_what_followed_the_last_occurrence_of_the_most_tokens(
    tokens: list[int], counts: list[int]
) -> None:
    expected, matched = list[int](), 0
    for length in range(1, len(counts)):
        for end in range(length, len(tokens)):
            if tokens[end - length : end] == tokens[-length:]:
                again = tokens[end:] * 5  # as often as it is drafted
                expected, matched = again[: counts[length]], length
    assert following(np.array(tokens, dtype=np.int32), counts) == (expected, matched)
