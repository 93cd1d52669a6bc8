"""The tokens that drafts are chosen from, where the vocabulary is large.

A draft reads the whole LM head for one token. With the rows of the most frequent tokens alone it
reads a part; the judge reads all, so rare tokens cost a rejected draft and nothing else. Of
WikiText-2's validation split, in GPT-2's vocabulary, the quarter that is most frequent in the test
split (296,000 tokens) covers 95 %, and the first quarter by number 90 %: so they are counted, by
`exitserve calibrate`, on the text that it is given.

The file is optional, and lies in a folder of its own: loaders read every .safetensors beside the
weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from exitserve.checkpoint.files import replace_file
from exitserve.checkpoint.hub import hub_file
from exitserve.errors import ExitServeError

if TYPE_CHECKING:
    from torch import Tensor

FILE = "draft_head/tokens.safetensors"
"""In a checkpoint."""
ROWS = 32_000
"""Tokens that are kept."""
WORTH_CUTTING = 1.5
"""A vocabulary of fewer times as many tokens is drafted from as it is."""


def most_frequent(texts: Iterable[Iterable[int]], vocab_size: int) -> list[int] | None:
    """The tokens that occur most often, ascending; of the others, those with the lowest numbers.

    Args:
        texts: token ids.
        vocab_size: V.

    Returns:
        `ROWS` of them; None where the whole vocabulary is hardly more.
    """
    if vocab_size < WORTH_CUTTING * ROWS:
        return None
    counts = [0] * vocab_size
    for text in texts:
        for token in text:
            counts[token] += 1
    by_count = sorted(range(vocab_size), key=lambda token: -counts[token])
    return sorted(by_count[:ROWS])


def save_draft_tokens(model_dir: Path | str, token_ids: list[int]) -> None:
    """Writes the file into a checkpoint directory."""
    import torch
    from safetensors.torch import save

    path = Path(model_dir) / FILE
    path.parent.mkdir(exist_ok=True)
    replace_file(path, save({"token_ids": torch.tensor(token_ids, dtype=torch.int32)}))


def load_draft_tokens(model: Path | str, revision: str | None = None) -> Tensor | None:
    """The tokens [N] int64 of a checkpoint directory or hub id; None if it has no such file.

    Raises:
        ExitServeError: the file is broken.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        path = Path(model) / FILE if Path(model).is_dir() else hub_file(str(model), FILE, revision)
    except ExitServeError:  # of a hub, which has no such file
        return None
    if not path.is_file():
        return None
    try:
        return load(path.read_bytes())["token_ids"].long()
    except (OSError, SafetensorError, KeyError) as error:
        raise ExitServeError(
            f"'{path}' cannot be read ({error}); delete it, or calibrate again."
        ) from error
