"""The text of a calibration: held-out windows, and continuations that the model itself writes.

A server decodes the model's own text, which is more predictable than text written by people. A
promise is tested on both.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exitserve.calibration.outcomes import Piece, Source
from exitserve.calibration.unfinished import Recall, anew
from exitserve.errors import ExitServeError
from exitserve.reference import Reference
from exitserve.windows import Window

FEWEST_TOKENS = 8
"""Shorter continuations are dropped."""
BATCH = 128
"""Continuations generated together."""


@dataclass(frozen=True)
class PieceSplit:
    """Pieces by their use; no piece is in two of the parts."""

    count: list[Piece]
    """For counting tokens, of which the most frequent are the exit rows."""
    select: list[Piece]
    """For proposing choices, and for their order."""
    test: list[Piece]
    """For testing the promise, and for nothing else."""


SHARES = (0.1, 0.2)
"""Shares of the pieces for counting and for selection; the test needs most and gets the rest."""


def independent_windows(
    windows: Sequence[Window], count: int, seed: int, *, running: bool
) -> list[Window]:
    """At most `count` windows in random order, one of each document.

    The test needs independent pieces, and windows of one document depend on each other. Running
    text has no documents: all its windows are draws from one text.
    """
    drawn = random.Random(seed)
    shuffled = drawn.sample(list(windows), len(windows))
    if not running:
        first = {window.document: window for window in reversed(shuffled)}
        shuffled = [window for window in shuffled if first[window.document] is window]
    return shuffled[:count]


def split_pieces(pieces: Sequence[Piece]) -> PieceSplit:
    """Divides pieces, already in random order, into the three parts, each source by itself."""
    parts = PieceSplit([], [], [])
    for source in ("text", "generated"):
        own = [piece for piece in pieces if piece.source == source]
        first, second = (round(share * len(own)) for share in SHARES)
        parts.count.extend(own[:first])
        parts.select.extend(own[first : first + second])
        parts.test.extend(own[first + second :])
    return parts


@torch.no_grad()
def model_continuations(
    reference: Reference,
    prompts: Sequence[tuple[int, ...]],
    tokens: int,
    temperature: float,
    seed: int,
    advance: Callable[[int], None],
    recall: Recall = anew,
) -> list[Piece]:
    """Continuations that the model writes at full depth, after prompts of equal length.

    Args:
        reference: the oracle, whose model writes.
        prompts: token ids.
        tokens: most tokens of a continuation.
        temperature: of the sampling; 0: greedy.
        seed: of the sampling.
        advance: called with the number of prompts done since the last call.
        recall: knows what was written before an interruption.

    Returns:
        Prompt and continuation, up to its end of sequence; those of at least `FEWEST_TOKENS`.
    """
    how: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    ends = reference.eos_token_ids.tolist()
    found = []
    for start in range(0, len(prompts), BATCH):
        batch = torch.tensor(prompts[start : start + BATCH], device=reference.device)

        def write(batch: Tensor = batch, start: int = start) -> list[list[int]]:
            torch.manual_seed(seed + start)  # of each batch, so that any can be the first of a run
            output = reference.model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=tokens,
                **how,
                repetition_penalty=1.0,
                no_repeat_ngram_size=0,
                pad_token_id=ends[0] if ends else 0,
            )
            return output.tolist()  # type: ignore[no-any-return]  # of transformers

        length = batch.shape[1]
        for row in recall(f"written {start}", write):
            written = row[length:]
            stop = next((i for i, token in enumerate(written) if token in ends), len(written))
            if stop >= FEWEST_TOKENS:
                found.append(Piece((*row[:length], *written[:stop]), length, "generated"))
        advance(len(batch))
    return found


def check_enough(
    parts: PieceSplit, sources: Sequence[Source], least: int, name: str, target: str
) -> None:
    """Raises `ExitServeError`, saying how much is needed, if a source has too few pieces to
    test."""
    for source in sources:
        count = sum(piece.source == source for piece in parts.test)
        chosen = any(piece.source == source for piece in parts.select)
        if count < least or not chosen:
            whole = max(10, math.ceil(least / (1.0 - sum(SHARES))))
            what = "window of held-out text" if source == "text" else "continuation"
            raise ExitServeError(
                f"'{name}' gives too little ({what}: {count}) for the test of {target}, which "
                f"needs at least {least} even if every one of them is perfect (and about three "
                f"times as many if they are not): give text for {whole} or more (--windows, a "
                f"shorter --window; a row of a .jsonl gives one), or a target that is easier."
            )
