"""Drafts of a request's own text: what followed its last tokens where they occurred before.

As vLLM's n-grams, whose code can be called by one engine of a process only: it loads numba, among
whose modules `vllm.triton_utils.dispatcher` then fails at the next one.

Shapes: T tokens.
"""

from collections.abc import Sequence
from itertools import cycle, islice

import numpy as np
from numpy.typing import NDArray

NGRAMS = 2, 4
"""Tokens, least and most, that vLLM's kernels look for on GPUs."""


def following(tokens: NDArray[np.int32], counts: Sequence[int]) -> tuple[list[int], int]:
    """What followed the last occurrence of the most of its last tokens, and how many these were.

    Args:
        tokens: [T] what the request read and wrote.
        counts: how many tokens are drafted, by how many had occurred; the last count is that of
            longer matches, too.
    """
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    found, length = ends, 0
    while len(ends) and length < len(counts) - 1:
        found, length = ends, length + 1
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[-1 - length]]
    if not length:
        return [], 0
    start = found[-1] + 1
    follows = tokens[start : start + counts[length]].tolist()
    # Of a text that repeats, what followed ends where the text does: it goes on in a circle.
    return list(islice(cycle(follows), counts[length])), length
