"""Leaves out the rows that have exited: states, positions and attention metadata, on the device.

Which rows are left is known on the device alone. Nothing here waits for it: results have room for
all rows, those that are left come first, in their order, and `num_left` says how many they are.

Shapes: B rows, T tokens of them, D hidden, M blocks of a row's cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from exitserve_kernels.compact_rows import reference
from exitserve_kernels.dispatch import Asked, choose


class Batch(NamedTuple):
    """What a forward pass needs of its rows."""

    states: Tensor
    """[T, D] residual streams."""
    positions: Tensor
    """[T] int64, of each token in its text."""
    slots: Tensor
    """[T] int64, where the token's keys and values go; -1: nowhere."""
    starts: Tensor
    """[B + 1] int32: row b has the tokens from starts[b] up to starts[b + 1]."""
    lengths: Tensor
    """[B] int32: tokens of each row in the cache, those of this pass included."""
    blocks: Tensor
    """[B, M] int32: the blocks of each row's cache."""


class Compacted(NamedTuple):
    """The rows that are left."""

    batch: Batch
    """The same shapes. Beyond the rows left: length 0, slot -1, states, positions and blocks 0;
    every start there is the number of tokens left."""
    rows: Tensor
    """[B] int32: which row of the old batch each one was; -1 beyond."""
    num_left: Tensor
    """[1] int32: how many rows are left."""


def compact_rows(exits: Tensor, batch: Batch, *, implementation: Asked = "auto") -> Compacted:
    """Keeps the rows of a batch that do not exit.

    Args:
        exits: [B] bool, the rows that leave.
        batch: all rows; nothing of it is changed.
        implementation: `auto`, `triton` or `torch`.

    Raises:
        ValueError: shapes or types do not go together.
    """
    _check(exits, batch)
    form = choose("compact_rows", exits.device, implementation)
    if form == "torch" or not len(exits):
        return Compacted(*reference.compact(exits, batch, Batch))
    from exitserve_kernels.compact_rows import fused

    return Compacted(*fused.compact(exits, batch, Batch))


def _check(exits: Tensor, batch: Batch) -> None:
    rows, tokens = exits.shape[0], batch.states.shape[0]
    expected = {
        "positions": (tokens,),
        "slots": (tokens,),
        "starts": (rows + 1,),
        "lengths": (rows,),
    }
    for name, shape in expected.items():
        found = tuple(getattr(batch, name).shape)
        if found != shape:
            raise ValueError(f"{name} has shape {found}; expected {shape}.")
    if exits.dtype != torch.bool or exits.dim() != 1:
        raise ValueError(
            f"exits is {exits.dtype} of shape {tuple(exits.shape)}; expected bool [B]."
        )
    if batch.states.dim() != 2 or batch.blocks.dim() != 2 or batch.blocks.shape[0] != rows:
        raise ValueError(
            f"states {tuple(batch.states.shape)} and blocks {tuple(batch.blocks.shape)} must be "
            f"[T, D] and [{rows}, M]."
        )
