"""The exit check in Triton: tiles of logits that live in registers, then a join over tiles.

In `_tiles` each program computes a [rows, tokens] tile of the logits and keeps six numbers a row.
In `_join` each program joins one row's tiles (or ranks of tensor parallelism), and with `FINISH`
also computes the confidence and whether the row exits. No atomics: the same input gives the same
bits.

Shapes: B rows, D hidden, V vocabulary, S slices (tiles or ranks).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from exitserve_kernels.exit_check.reference import FIELDS, Head
from exitserve_kernels.in_triton import dot, narrowed, tanh

WIDTH = len(FIELDS)
TILE_V = 128
TILE_D = 64
SLICES = 256
"""Tiles that `_join` reads at a time."""
CRITERIA = {"max_prob": 0, "margin": 1, "entropy": 2}


@triton.jit
def _tiles(
    rows,
    weight,
    bias,
    ends,
    out,
    kept,
    num_rows,
    width,
    columns,
    first_token,
    row_stride,
    row_step,
    weight_stride,
    weight_step,
    kept_stride,
    soft_cap,
    scale,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    ROUNDED: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # Programs with the same tokens run one after another, so their weights are in the cache.
    row = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    tile = tl.program_id(1)
    token = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    row_in, token_in = row < num_rows, token < columns
    row_at = rows + row.to(tl.int64)[:, None] * row_stride
    weight_at = weight + token.to(tl.int64)[:, None] * weight_stride
    logits = tl.zeros([BLOCK_B, BLOCK_V], dtype=tl.float32)
    for start in range(0, width, BLOCK_D):
        place = start + tl.arange(0, BLOCK_D)
        place_in = place < width
        x = tl.load(
            row_at + place[None, :] * row_step, mask=row_in[:, None] & place_in[None, :], other=0.0
        )
        w = tl.load(
            weight_at + place[None, :] * weight_step,
            mask=token_in[:, None] & place_in[None, :],
            other=0.0,
        )
        logits = dot(x, tl.trans(w), logits)
    if HAS_BIAS:
        logits += tl.load(bias + token, mask=token_in, other=0.0).to(tl.float32)[None, :]
    if HAS_CAP:
        logits = tanh(logits / soft_cap) * soft_cap
    logits = logits * scale
    if ROUNDED:
        logits = narrowed(logits, rows.dtype.element_ty).to(tl.float32)
    if KEEP:
        at = kept + row.to(tl.int64)[:, None] * kept_stride + token[None, :]
        inside = row_in[:, None] & token_in[None, :]
        tl.store(at, narrowed(logits, kept.dtype.element_ty), mask=inside)
    logits = tl.where(token_in[None, :], logits, float("-inf"))

    bad = tl.max((logits != logits).to(tl.int32), axis=1) > 0
    top = tl.where(bad, float("nan"), tl.max(logits, axis=1))
    places = tl.where(logits == top[:, None], token[None, :], columns - 1)
    first = tl.minimum(tl.min(places, axis=1), columns - 1)
    second = tl.max(tl.where(token[None, :] == first[:, None], float("-inf"), logits), axis=1)
    shifted = logits - top[:, None]
    powers = tl.exp(shifted)
    # Columns beyond the vocabulary are -inf too; with a top of -inf they must not become NaN.
    powers = tl.where(token_in[None, :], powers, 0.0)
    total = tl.sum(powers, axis=1)
    products = tl.where(logits == float("-inf"), 0.0, shifted * powers)
    weighted = tl.sum(products, axis=1)
    end = tl.full([BLOCK_B], float("-inf"), dtype=tl.float32)
    if HAS_ENDS:
        ending = tl.load(ends + token, mask=token_in, other=0) != 0
        end = tl.max(tl.where(ending[None, :], logits, float("-inf")), axis=1)
        end = tl.where(bad, float("nan"), end)

    at = out + (row.to(tl.int64) * tl.num_programs(1) + tile) * WIDTH
    tl.store(at, top, mask=row_in)
    tl.store(at + 1, total, mask=row_in)
    tl.store(at + 2, (first + first_token).to(tl.float32), mask=row_in)
    tl.store(at + 3, second, mask=row_in)
    tl.store(at + 4, weighted, mask=row_in)
    tl.store(at + 5, end, mask=row_in)


@triton.jit
def _join(
    summaries,
    out,
    confidence,
    exits,
    thresholds,
    end_thresholds,
    num_slices,
    log_vocabulary,
    CRITERION: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    FINISH: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = summaries + row * num_slices * WIDTH
    lane = tl.arange(0, BLOCK_S)
    best_of = tl.full([BLOCK_S], float("-inf"), dtype=tl.float32)
    bad_of = tl.zeros([BLOCK_S], dtype=tl.int32)
    for start in range(0, num_slices, BLOCK_S):
        inside = start + lane < num_slices
        top = tl.load(base + (start + lane) * WIDTH, mask=inside, other=float("-inf"))
        bad_of = bad_of | (top != top).to(tl.int32)
        best_of = tl.maximum(best_of, top)
    best = tl.where(tl.max(bad_of, axis=0) > 0, float("nan"), tl.max(best_of, axis=0))

    total_of = tl.zeros([BLOCK_S], dtype=tl.float32)
    weighted_of = tl.zeros([BLOCK_S], dtype=tl.float32)
    winners_of = tl.zeros([BLOCK_S], dtype=tl.int32)
    second_of = tl.full([BLOCK_S], float("-inf"), dtype=tl.float32)
    end_of = tl.full([BLOCK_S], float("-inf"), dtype=tl.float32)
    # Tokens are below 2^24. Where no slice has the top (NaN), the last slice's token is used.
    token_of = tl.full([BLOCK_S], 16777216.0, dtype=tl.float32)
    for start in range(0, num_slices, BLOCK_S):
        inside = start + lane < num_slices
        at = base + (start + lane) * WIDTH
        top = tl.load(at, mask=inside, other=float("-inf"))
        empty = top == float("-inf")
        lag = tl.where(empty, 0.0, top - best)
        share = tl.exp(top - best)
        total = tl.where(empty, 0.0, tl.load(at + 1, mask=inside, other=0.0))
        weighted = tl.where(empty, 0.0, tl.load(at + 4, mask=inside, other=0.0))
        total_of += tl.where(inside, share * total, 0.0)
        weighted_of += tl.where(inside, share * (weighted + lag * total), 0.0)
        token = tl.load(at + 2, mask=inside, other=16777216.0)
        won = inside & (top == best)
        winners_of += won.to(tl.int32)
        token_of = tl.minimum(token_of, tl.where(won, token, 16777216.0))
        second_of = tl.maximum(second_of, tl.load(at + 3, mask=inside, other=float("-inf")))
        second_of = tl.maximum(second_of, tl.where(won, float("-inf"), top))
        end_of = tl.maximum(end_of, tl.load(at + 5, mask=inside, other=float("-inf")))
    total = tl.sum(total_of, axis=0)
    weighted = tl.sum(weighted_of, axis=0)
    # Two slices with the top: the second is the top itself.
    tied = tl.sum(winners_of, axis=0) > 1
    second = tl.where(tied, best, tl.max(second_of, axis=0))
    last = tl.load(base + (num_slices - 1) * WIDTH + 2)
    token = tl.min(token_of, axis=0)
    token = tl.where(token == 16777216.0, last, token)
    end = tl.max(end_of, axis=0)
    at = out + row * WIDTH
    tl.store(at, best)
    tl.store(at + 1, total)
    tl.store(at + 2, token)
    tl.store(at + 3, second)
    tl.store(at + 4, weighted)
    tl.store(at + 5, end)
    if FINISH:
        if CRITERION == 0:
            sure = 1.0 / total
        elif CRITERION == 1:
            sure = (1.0 - tl.exp(second - best)) / total
        else:
            sure = 1.0 - (tl.log(total) - weighted / total) / log_vocabulary
        threshold = tl.load(thresholds + row).to(tl.float32)
        if HAS_ENDS:
            of_end = tl.load(end_thresholds + row).to(tl.float32)
            threshold = tl.where(end == best, of_end, threshold)
        tl.store(confidence + row, sure)
        # A comparison with NaN is false: such a row does not exit.
        tl.store(exits + row, sure > threshold)


def summarise(rows: Tensor, head: Head, first_token: int, kept: Tensor | None) -> Tensor:
    """`reference.summarise`; at least one row. `kept` [B, columns] receives the logits."""
    num_rows, width = rows.shape
    columns = head.columns
    block_b = block_of_rows(num_rows, rows.dtype)
    tiles = triton.cdiv(columns, TILE_V)
    out = rows.new_empty((num_rows, tiles, WIDTH), dtype=torch.float32)
    _tiles[(triton.cdiv(num_rows, block_b), tiles)](
        rows,
        head.weight,
        rows if head.bias is None else head.bias,
        rows if head.ends is None else head.ends,
        out,
        rows if kept is None else kept,
        num_rows,
        width,
        columns,
        first_token,
        rows.stride(0),
        rows.stride(1),
        head.weight.stride(0),
        head.weight.stride(1),
        0 if kept is None else kept.stride(0),
        1.0 if head.soft_cap is None else head.soft_cap,
        head.scale,
        HAS_BIAS=head.bias is not None,
        HAS_CAP=head.soft_cap is not None,
        HAS_ENDS=head.ends is not None,
        ROUNDED=head.rounded,
        KEEP=kept is not None,
        BLOCK_B=block_b,
        BLOCK_V=TILE_V,
        BLOCK_D=TILE_D,
        WIDTH=WIDTH,
        num_warps=warps_of(block_b),
        num_stages=3,
    )
    return join(out)


def block_of_rows(num_rows: int, dtype: torch.dtype) -> int:
    """Rows of a tile: no more than needed, so that small batches cost only the weights' bytes.

    128 of float32 need 128 KiB of shared memory, more than an L4 or an RTX 4090 has, and spill.
    """
    most = 32 if dtype == torch.float32 else 128
    return max(16, min(most, triton.next_power_of_2(num_rows)))


def warps_of(block_b: int) -> int:
    """Warps of a program with `block_b` rows."""
    return 4 if block_b < 64 else 8


def join(summaries: Tensor) -> Tensor:
    """`reference.join`; at least one row."""
    whole, _, _ = _joined(summaries, None, "max_prob", 2, None)
    return whole


def finish(
    summaries: Tensor,
    thresholds: Tensor,
    criterion: str,
    vocab_size: int,
    end_thresholds: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The joined summary [B, 6], confidence [B] and exits [B]; at least one row."""
    return _joined(summaries, thresholds, criterion, vocab_size, end_thresholds)


def _joined(
    summaries: Tensor,
    thresholds: Tensor | None,
    criterion: str,
    vocab_size: int,
    end_thresholds: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    summaries = summaries.contiguous()
    num_rows, num_slices, _ = summaries.shape
    out = summaries.new_empty((num_rows, WIDTH))
    confidence = summaries.new_empty(num_rows)
    exits = summaries.new_empty(num_rows, dtype=torch.bool)
    _join[(num_rows,)](
        summaries,
        out,
        confidence,
        exits,
        summaries if thresholds is None else thresholds.contiguous(),
        summaries if end_thresholds is None else end_thresholds.contiguous(),
        num_slices,
        math.log(max(vocab_size, 2)),
        CRITERION=CRITERIA[criterion],
        HAS_ENDS=end_thresholds is not None,
        FINISH=thresholds is not None,
        BLOCK_S=min(SLICES, triton.next_power_of_2(num_slices)),
        WIDTH=WIDTH,
        num_warps=4,
    )
    return out, confidence, exits
