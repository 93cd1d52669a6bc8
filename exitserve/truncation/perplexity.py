"""The perplexity of a checkpoint on a user's file, as `exitserve_training.inspect` measures it.

Documents are tokenised, each followed by an end-of-sequence token, joined, and cut into windows, of
which some are drawn. A window's first token is not predicted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from exitserve.checkpoint.block import context_length_of, read_config
from exitserve.checkpoint.decoder import capture_hidden, decoder_parts
from exitserve.errors import ExitServeError
from exitserve.reference import roomy_device
from exitserve.windows import load_tokenizer, read_text, texts_of_rows

WINDOW = 256
"""Tokens of a window, or the model's context if that is shorter."""
MOST_WINDOWS = 200
_BATCH = 4
_ROWS = (".jsonl", ".json")


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """A perplexity, and the text on which it was measured."""

    value: float
    tokens: int
    """How many tokens were predicted."""
    window: int
    files: tuple[str, ...]
    """Names of the text files."""


def token_windows(
    paths: Sequence[Path],
    tokenizer: Any,
    *,
    length: int,
    most: int = MOST_WINDOWS,
    seed: int = 0,
) -> list[list[int]]:
    """Reads files into windows of tokens, drawn without replacement.

    Args:
        paths: text files, or JSON lines with a field `text`.
        tokenizer: the model's.
        length: tokens of a window.
        most: windows to draw; fewer if the files hold fewer.
        seed: of the draw.

    Raises:
        ExitServeError: a file cannot be read, or holds less than a window.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    stream: list[int] = []
    for path in paths:
        for text in _documents(path):
            stream += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + end
    count = len(stream) // length
    if not count:
        raise ExitServeError(
            f"the data have {len(stream)} tokens, fewer than a window of {length}; give more text."
        )
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return [stream[index * length : (index + 1) * length] for index in order[:most]]


def _documents(path: Path) -> Iterable[str]:
    content = read_text(path)
    return filter(None, texts_of_rows(content, path)) if path.suffix in _ROWS else (content,)


def read_windows(model_dir: Path, files: Sequence[Path]) -> Tensor:
    """Windows [W, T] of files, in the tokens of a local checkpoint.

    Raises:
        ExitServeError: a file or the tokenizer cannot be read.
    """
    tokenizer = load_tokenizer(model_dir, fix="leave out --data, or save the model's own into it")
    longest = context_length_of(read_config(model_dir))
    length = WINDOW if longest is None else min(WINDOW, longest)
    return torch.tensor(token_windows(files, tokenizer, length=length))


def measure_perplexity(model_dir: Path, windows: Tensor, files: Sequence[Path]) -> Perplexity:
    """The perplexity of a local checkpoint in float32, on windows [W, T] of some files.

    Raises:
        ExitServeError: transformers cannot load it, perhaps for lack of a quantisation library.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    except (ImportError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ExitServeError(
            f"the perplexity cannot be measured ({reason}); leave out --data."
        ) from error
    model = model.train(False).to(roomy_device(model))
    count, length = windows.shape
    with torch.no_grad():
        nats = sum(_nats(model, windows[at : at + _BATCH]) for at in range(0, count, _BATCH))
    tokens = count * (length - 1)
    names = tuple(path.name for path in files)
    return Perplexity(value=math.exp(nats / tokens), tokens=tokens, window=length, files=names)


def _nats(model: Any, ids: Tensor) -> float:
    """The sum of cross-entropies of windows [B, T], in float32 as `inspect` computes them."""
    parts, ids = decoder_parts(model), ids.to(model.device)
    with capture_hidden(parts.layers, [parts.num_layers]) as hidden:
        model.base_model(ids)
    total = 0.0
    # One window at a time: logits are [T, V].
    for states, labels in zip(hidden[parts.num_layers], ids, strict=True):
        logits = parts.classify(states[:-1])
        total += float(functional.cross_entropy(logits.float(), labels[1:], reduction="sum"))
    return total
