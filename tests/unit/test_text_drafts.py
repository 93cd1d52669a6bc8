"""Drafts of the text, against a search token by token."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from exitserve.engine.drafting.text import NGRAMS, following

# Numbers whose bytes make others where tokens meet, and few, so that most texts repeat.
TOKENS = st.sampled_from([0, 1, 256, 257, 65536, 16777216])


@given(tokens=st.lists(TOKENS, max_size=20), count=st.integers(1, 5))
def test_what_followed_the_last_occurrence_of_the_most_tokens(
    tokens: list[int], count: int
) -> None:
    expected: list[int] = []
    for length in range(NGRAMS[0], NGRAMS[1] + 1):
        for end in range(length, len(tokens)):
            if tokens[end - length : end] == tokens[-length:]:
                expected = tokens[end : end + min(count, length)]
    assert following(np.array(tokens, dtype=np.int32), count) == expected
