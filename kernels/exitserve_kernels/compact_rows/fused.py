"""Compaction in Triton: one program finds the places, then each row moves to its own.

Shapes: B rows, T tokens, D hidden, M blocks of a row's cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from exitserve_kernels.ahead_of_time import Variant

TILE_D = 1024
MOST_ROWS = 4096
"""Rows whose places are found at once; the largest case that is compiled ahead of time."""


@triton.jit
def _place(exits, starts, new_starts, places, count, num_rows, BLOCK_B: tl.constexpr):
    row = tl.arange(0, BLOCK_B)
    inside = row < num_rows
    stays = (tl.load(exits + row, mask=inside, other=1) == 0) & inside
    first = tl.load(starts + row, mask=inside, other=0)
    size = tl.where(stays, tl.load(starts + row + 1, mask=inside, other=0) - first, 0)
    rank = tl.cumsum(stays.to(tl.int32), axis=0)
    end = tl.cumsum(size, axis=0)
    left = tl.sum(stays.to(tl.int32), axis=0)
    tokens = tl.sum(size, axis=0)
    tl.store(places + row, tl.where(stays, rank - 1, -1), mask=inside)
    tl.store(count, left)
    tl.store(new_starts, 0)
    # Row r of those left ends where its tokens do; beyond them all starts are the last end.
    tl.store(new_starts + rank, end, mask=stays)
    tl.store(new_starts + 1 + row, tokens, mask=inside & (row >= left))


@triton.jit
def _move(
    states,
    positions,
    slots,
    starts,
    lengths,
    blocks,
    places,
    new_states,
    new_positions,
    new_slots,
    new_starts,
    new_lengths,
    new_blocks,
    rows,
    width,
    num_blocks,
    state_stride,
    state_step,
    block_stride,
    block_step,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    row = tl.program_id(0)
    place = tl.load(places + row)
    if place >= 0:
        part = tl.program_id(1)
        first = tl.load(starts + row)
        size = tl.load(starts + row + 1) - first
        new_first = tl.load(new_starts + place)
        column = part * BLOCK_D + tl.arange(0, BLOCK_D)
        for token in range(0, size):
            old = (first + token).to(tl.int64)
            new = (new_first + token).to(tl.int64)
            state = tl.load(
                states + old * state_stride + column * state_step, mask=column < width, other=0.0
            )
            tl.store(new_states + new * width + column, state, mask=column < width)
            if part == 0:
                tl.store(new_positions + new, tl.load(positions + old))
                tl.store(new_slots + new, tl.load(slots + old))
        if part == 0:
            tl.store(new_lengths + place, tl.load(lengths + row))
            tl.store(rows + place, row)
            for start in range(0, num_blocks, BLOCK_M):
                block = start + tl.arange(0, BLOCK_M)
                known = tl.load(
                    blocks + row.to(tl.int64) * block_stride + block * block_step,
                    mask=block < num_blocks,
                    other=0,
                )
                at = new_blocks + place.to(tl.int64) * num_blocks + block
                tl.store(at, known, mask=block < num_blocks)


def compact(exits: Tensor, batch: Any, make: Any) -> tuple[Any, Tensor, Tensor]:
    """See `compact_rows`; at least one row."""
    num_rows, width, num_blocks = len(exits), batch.states.shape[1], batch.blocks.shape[1]
    left = make(
        states=torch.zeros_like(batch.states, memory_format=torch.contiguous_format),
        positions=torch.zeros_like(batch.positions),
        slots=torch.full_like(batch.slots, -1),
        starts=torch.empty_like(batch.starts),
        lengths=torch.zeros_like(batch.lengths),
        blocks=torch.zeros_like(batch.blocks, memory_format=torch.contiguous_format),
    )
    places = torch.empty(num_rows, dtype=torch.int32, device=exits.device)
    rows = torch.full_like(places, -1)
    count = torch.empty(1, dtype=torch.int32, device=exits.device)
    _place[(1,)](
        exits.contiguous(),
        batch.starts,
        left.starts,
        places,
        count,
        num_rows,
        BLOCK_B=triton.next_power_of_2(num_rows),
        num_warps=4,
    )
    _move[(num_rows, max(1, triton.cdiv(width, TILE_D)))](
        batch.states,
        batch.positions,
        batch.slots,
        batch.starts,
        batch.lengths,
        batch.blocks,
        places,
        *left,
        rows,
        width,
        num_blocks,
        *batch.states.stride(),
        *batch.blocks.stride(),
        BLOCK_D=min(TILE_D, max(16, triton.next_power_of_2(width))),
        BLOCK_M=128,
        num_warps=4,
    )
    return left, rows, count


_INTEGERS = ("starts", "lengths", "blocks", "places", "new_starts", "new_lengths", "new_blocks")

VARIANTS = [
    Variant(
        "compact_rows place",
        _place,
        {
            "exits": "*i1",
            **dict.fromkeys(("starts", "new_starts", "places", "count"), "*i32"),
            "num_rows": "i32",
        },
        {"BLOCK_B": MOST_ROWS},
    ),
    Variant(
        "compact_rows move, bf16",
        _move,
        {
            **dict.fromkeys(("states", "new_states"), "*bf16"),
            **dict.fromkeys(("positions", "slots", "new_positions", "new_slots"), "*i64"),
            **dict.fromkeys((*_INTEGERS, "rows"), "*i32"),
            **dict.fromkeys(("width", "state_stride"), "i32:16"),
            **dict.fromkeys(("num_blocks", "block_stride"), "i32"),
        },
        {"state_step": 1, "block_step": 1, "BLOCK_D": TILE_D, "BLOCK_M": 128},
    ),
]
