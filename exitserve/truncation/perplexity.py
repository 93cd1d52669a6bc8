"""The perplexity of a checkpoint on a user's files, for its model card: exact, in float32.

Files are cut into windows as `exitserve eval` cuts them. A window's first token is not predicted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exitserve.agreement import run_full_depth
from exitserve.checkpoint.block import context_length_of, read_config
from exitserve.errors import ExitServeError
from exitserve.reference import load_reference
from exitserve.windows import Window, load_tokenizer, read_documents, windows_of

WINDOW = 256
"""Tokens of a window, or the model's context if that is shorter."""
MOST_WINDOWS = 200
"""Of each file."""
SEED = 0
"""Of their choice."""


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """A perplexity, and the text on which it was measured."""

    value: float
    tokens: int
    """How many tokens were predicted."""
    window: int
    files: tuple[str, ...]
    """Names of the text files."""


def read_windows(model_dir: Path, files: Sequence[Path]) -> list[Window]:
    """Windows of files, in the tokens of a local checkpoint.

    Raises:
        ExitServeError: a file or the tokenizer cannot be read, or a file is too short.
    """
    tokenizer = load_tokenizer(model_dir, fix="leave out --data, or save the model's own into it")
    longest = context_length_of(read_config(model_dir))
    length = WINDOW if longest is None else min(WINDOW, longest)
    return [
        window
        for file in files
        for window in windows_of(read_documents(file), tokenizer, length, MOST_WINDOWS, SEED)
    ]


def measure_perplexity(
    model_dir: Path, windows: Sequence[Window], files: Sequence[Path]
) -> Perplexity:
    """The perplexity of a local checkpoint at full depth, on windows of some files.

    Raises:
        ExitServeError: transformers cannot load it, perhaps for lack of a quantisation library.
    """
    try:
        model = load_reference(str(model_dir), (), device="auto")
    except (ImportError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ExitServeError(
            f"the perplexity cannot be measured ({reason}); leave out --data."
        ) from error
    passes = (run_full_depth(model, window.token_ids, 0) for window in windows)
    nats = sum(float(one.nats.double().sum()) for one in passes)
    length = len(windows[0].token_ids)
    tokens = len(windows) * (length - 1)
    names = tuple(path.name for path in files)
    return Perplexity(value=math.exp(nats / tokens), tokens=tokens, window=length, files=names)
