"""Drafts of a request's own text: what followed its last tokens where they occurred before.

As vLLM's n-grams, whose code can be called by one engine of a process only: it loads numba, among
whose modules `vllm.triton_utils.dispatcher` then fails at the next one.

Shapes: T tokens.
"""

import numpy as np
from numpy.typing import NDArray

NGRAMS = 2, 4
"""Tokens, least and most, that must have occurred before."""


def following(tokens: NDArray[np.int32], count: int) -> list[int]:
    """What followed the last occurrence of the most of its last tokens.

    As many tokens as had occurred: the longer that was, the more often they are right.

    Args:
        tokens: [T] what the request read and wrote.
        count: at most so many.
    """
    data, size = tokens.tobytes(), tokens.itemsize
    least, most = NGRAMS
    for length in range(min(most, len(tokens) - 1), least - 1, -1):
        last = data[-length * size :]
        at = data.rfind(last, 0, len(data) - size)
        while at > 0 and at % size:  # bytes of two tokens that look like one
            at = data.rfind(last, 0, at + len(last) - 1)
        if at >= 0:
            start = at // size + length
            return [int(token) for token in tokens[start : start + min(count, length)]]
    return []
