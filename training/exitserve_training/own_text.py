"""Text that a model writes itself: what its drafts will have to guess when it is served.

Drafts are judged on the model's own answers, so a shallow exit that is to draft learns most from
those (as draft models do; Leviathan et al. 2023, arXiv 2211.17192, call the share accepted alpha).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import datasets

from exitserve.engine.writing import Writer, Written
from exitserve_training.data_recipe import OwnText
from exitserve_training.watching import counted


def with_own_text(
    packed: datasets.DatasetDict, model: str, own: OwnText, seed: int
) -> datasets.DatasetDict:
    """Replaces the training sequences by the model's continuations of their beginnings.

    What is held out stays, so that evaluation tells how well the model predicts the data.

    Args:
        packed: sequences `input_ids` [T] on both sides.
        model: directory or hub id; plain vLLM runs it at full depth.
        own: how many sequences, and how they are sampled.
        seed: chooses the sequences, and their tokens where they are sampled.
    """
    rows = list(range(len(packed["train"])))
    random.Random(seed).shuffle(rows)
    chosen = packed["train"].select(rows[: own.sequences])["input_ids"]
    beginnings = [list(ids[: own.prompt_tokens]) for ids in chosen]
    length = len(chosen[0])
    written = _continuations(model, beginnings, length, own.temperature, seed)
    sequences = [first + rest for first, rest in zip(beginnings, written, strict=True)]
    train = datasets.Dataset.from_dict({"input_ids": sequences}, features=packed["train"].features)
    return datasets.DatasetDict(train=train, validation=packed["validation"])


def _continuations(
    model: str, beginnings: Sequence[Sequence[int]], length: int, temperature: float, seed: int
) -> list[list[int]]:
    """What follows each beginning, also past an end of text, up to sequences of `length` tokens."""
    with Writer(model, length=length, count=len(beginnings), seed=seed) as writer:
        for number, ids in enumerate(beginnings):
            tokens = length - len(ids)
            writer.ask(number, ids, max_tokens=tokens, temperature=temperature, ignore_eos=True)
        said = counted(_taken(writer), "own text", len(beginnings))
        written = {one.number: one.tokens for one in said}
    return [written[number] for number in range(len(beginnings))]


def _taken(writer: Writer) -> Iterator[Written]:
    while writer.waiting:
        yield from writer.take()
