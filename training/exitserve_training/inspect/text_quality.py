"""How good generated text is without a reference: diversity and coherence.

Aligned-training paper, appendix C, eq. 5 and 6.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from exitserve_training.inspect.similarity import cosines


def diversity(tokens: Sequence[int]) -> float:
    """Returns how little a text repeats itself: 1 when no n-gram occurs twice, 0 when empty.

    Eq. 6: the product over n = 2, 3, 4 of unique n-grams / total n-grams. A text shorter than n
    tokens has no n-grams, and that n is left out; a single token has diversity 1.

    Args:
        tokens: the generated tokens, without the prompt.
    """
    if not tokens:
        return 0.0
    product = 1.0
    for n in range(2, min(4, len(tokens)) + 1):
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        product *= len(set(grams)) / len(grams)
    return product


def coherence(a: Tensor, b: Tensor) -> float:
    """Returns the cosine of a prompt's and its continuation's embedding (eq. 5), in [-1, 1].

    The paper embeds both with SimCSE; any encoder of sentences will do, if it is the same for
    all texts compared. A zero embedding has coherence 0 with all.

    Args:
        a: [D], the prompt's.
        b: [D], the continuation's.

    Raises:
        ExitServeError: the shapes differ or are not [D], or a or b hold NaN or infinity.
    """
    return float(cosines(a[None], b[None])[0])
