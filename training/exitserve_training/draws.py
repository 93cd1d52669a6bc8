"""Random draws that depend on the seed, the step and the sequence alone.

Neither the split into batches and processes nor a resumed run changes them, as it would those
of one generator for the process.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor


def row_generators(
    purpose: str, seed: int, step: int, input_ids: Tensor, mask: Tensor
) -> list[torch.Generator]:
    """One CPU generator for each sequence of `input_ids` [B, T].

    Args:
        purpose: what is drawn, so that different draws of a step differ.
        seed: the run's.
        step: the optimizer step.
        input_ids: the sequences, before anything is changed in them.
        mask: bool [B, T], tokens as opposed to padding, whose amount depends on the batch.
    """
    generators = []
    for row, is_token in zip(input_ids.cpu(), mask.cpu(), strict=True):
        own = zlib.crc32(row[is_token].numpy().tobytes())
        key = zlib.crc32(f"{purpose} {seed} {step} {own}".encode())
        generators.append(torch.Generator().manual_seed(key))
    return generators
