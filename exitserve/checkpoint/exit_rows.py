"""Exit rows: the rows of the LM head that an exit check reads, where the vocabulary is large.

A check of all rows costs as much as several layers. Rare tokens are hardly ever sure, so with the
rows of the most frequent tokens alone as many tokens pass a threshold, and nearly always the same
ones. Confidence is over these rows only, and the token is the most likely among them; drafts of the
first layers come from the same rows. `exitserve train` counts them in its text; `exitserve
calibrate` in the text that it is given and the model's own, and chooses thresholds by them.

Shapes: K exit rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from exitserve.checkpoint.calibration import ROWS_FOLDER
from exitserve.checkpoint.files import replace_file
from exitserve.checkpoint.hub import hub_file
from exitserve.errors import ExitServeError

if TYPE_CHECKING:
    from torch import Tensor


def most_frequent(
    texts: Iterable[Iterable[int]], count: int, vocab_size: int, always: Collection[int]
) -> list[int]:
    """The tokens that occur most often, ascending; of the others, those with the lowest numbers.

    Args:
        texts: token ids.
        count: K.
        vocab_size: V.
        always: tokens that are among them in any case: the ends of sequence.
    """
    counts = Counter(token for text in texts for token in text)
    others = (token for token in range(vocab_size) if token not in always)
    by_count = sorted(others, key=lambda token: -counts[token])
    return sorted([*always, *by_count[: count - len(always)]])


def save_exit_rows(model_dir: Path | str, token_ids: list[int]) -> str:
    """Writes exit rows into a checkpoint, beside earlier ones.

    Returns:
        Their name for the checkpoint's block (`MultiExit.rows`), a hash of what was written.
    """
    import torch
    from safetensors.torch import save

    data = save({"token_ids": torch.tensor(token_ids, dtype=torch.int32)})
    name = hashlib.sha256(data).hexdigest()
    path = Path(model_dir) / ROWS_FOLDER / f"{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    replace_file(path, data)
    return name


def load_exit_rows(model: Path | str, file: str, revision: str | None = None) -> Tensor:
    """The tokens [K] int64 of a checkpoint directory or hub id, ascending.

    Raises:
        ExitServeError: there is no such file, or it is broken.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    path = Path(model) / file if Path(model).is_dir() else hub_file(str(model), file, revision)
    if not path.is_file():
        raise ExitServeError(
            f"the config.json of '{model}' names exit rows, but there is no {file}: copy that "
            f"folder along with the checkpoint, or run exitserve calibrate again."
        )
    try:
        data = path.read_bytes()
        found: Tensor = load(data)["token_ids"].long()
    except (OSError, SafetensorError, KeyError) as error:
        raise ExitServeError(f"'{path}' cannot be read ({error}); calibrate again.") from error
    if path.stem != hashlib.sha256(data).hexdigest():
        raise ExitServeError(
            f"'{path}' is not what was written (its name is the hash of its contents); copy it "
            f"again, or calibrate again."
        )
    return found
