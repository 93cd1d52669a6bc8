"""The bytes model against hand-computed cases, and the bounds that must hold for any step."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitserve.costs.byte_costs import (
    DecoderShape,
    DecodeStep,
    full_depth,
    limit_speedup,
    serving_dtype,
    shape_of,
    step_bytes,
)
from exitserve.costs.devices import BYTES, roofline
from exitserve.errors import ExitServeError

from ..shapes import TINY_DECODER as TINY

# D = 8, F = 16, 4 heads and 2 kv heads of 2, V = 32, two bytes a number:
# Q and output 2 * 8 * 8 = 128, K and V 2 * 8 * 4 = 64, feed-forward 3 * 8 * 16 = 384 numbers.


def step(*depths: int, contexts: tuple[int, ...] | None = None, checks: int = 0) -> DecodeStep:
    return DecodeStep(depths=depths, contexts=contexts or (10,) * len(depths), checks=checks)


def test_parts_by_hand() -> None:
    assert TINY.kv_projection_bytes == 128
    assert TINY.layer_bytes == 2 * (128 + 64 + 384)
    assert TINY.head_bytes == 2 * 8 * 32
    assert TINY.kv_token_bytes == 2 * 2 * 2 * 2


def test_full_depth_reads_every_layer_the_head_once_and_the_cache() -> None:
    assert step_bytes(TINY, step(4)) == 4 * 1152 + 512 + 4 * 10 * 16


def test_mixed_depths_read_a_layer_once_and_the_cache_of_active_rows_only() -> None:
    found = step_bytes(TINY, step(1, 3, contexts=(5, 7), checks=2))
    assert found == 3 * 1152 + 128 + 2 * 512 + (1 * 5 + 3 * 7) * 16


def test_a_row_at_full_depth_needs_the_final_head_besides_the_checks() -> None:
    assert step_bytes(TINY, step(1, 4, checks=1)) == 4 * 1152 + 2 * 512 + (1 + 4) * 10 * 16


def test_limit_is_a_ratio_of_sums() -> None:
    steps = [step(1, checks=1), step(4, checks=1)]
    full = 2 * (4 * 1152 + 512 + 640)
    early = 1152 + 3 * 128 + 512 + 160
    assert limit_speedup(TINY, steps) == pytest.approx(full / (early + full / 2 + 512))


@given(st.integers(1, 3), st.integers(16, 4096), st.integers(1, 16))
def test_checks_read_the_exit_rows(exit_layer: int, vocab: int, rows: int) -> None:
    whole = dataclasses.replace(TINY, vocab_size=vocab)
    shape = dataclasses.replace(whole, exit_rows=rows)
    for checked in (step(exit_layer, checks=1), step(4, checks=1)):
        spared = step_bytes(whole, checked) - step_bytes(shape, checked)
        assert spared == (vocab - rows) * 8 * 2
    assert step_bytes(whole, step(4)) == step_bytes(shape, step(4))


def test_other_shapes() -> None:
    """GPT-2 has names of its own; a mixture reads its active experts."""
    gpt2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 100, "n_inner": None}
    shape = shape_of(gpt2, "float32")
    assert (shape.intermediate_size, shape.feed_forward_matrices) == (256, 2)
    mixture = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 999,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    assert shape_of(mixture, "float32").intermediate_size == 64


@pytest.mark.parametrize("value", [None, 0, True, "8", 1.5])
def test_shape_of_names_a_size_it_cannot_use(value: object) -> None:
    config = {
        "num_attention_heads": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": value,
    }
    with pytest.raises(ExitServeError, match="num_hidden_layers"):
        shape_of(config, "float32")


shapes = st.builds(
    DecoderShape,
    num_layers=st.integers(2, 12),
    hidden_size=st.integers(1, 512),
    intermediate_size=st.integers(1, 512),
    num_heads=st.integers(1, 8),
    num_kv_heads=st.integers(1, 8),
    head_dim=st.integers(1, 64),
    vocab_size=st.integers(1, 4096),
    dtype_bytes=st.sampled_from([2, 4]),
)


@st.composite
def shapes_and_rows(draw: st.DrawFn) -> tuple[DecoderShape, tuple[tuple[int, int], ...]]:
    """A shape, and (depth, context) of each row of one step."""
    shape = draw(shapes)
    row = st.tuples(st.integers(1, shape.num_layers), st.integers(0, 4096))
    return shape, tuple(draw(st.lists(row, min_size=1, max_size=8)))


def as_step(rows: tuple[tuple[int, int], ...], checks: int) -> DecodeStep:
    return DecodeStep(
        depths=tuple(d for d, _ in rows), contexts=tuple(c for _, c in rows), checks=checks
    )


@given(shapes_and_rows(), st.data())
def test_a_shallower_row_never_lowers_the_limit(
    case: tuple[DecoderShape, tuple[tuple[int, int], ...]], data: st.DataObject
) -> None:
    shape, rows = case
    index = data.draw(st.integers(0, len(rows) - 1))
    depth, context = rows[index]
    shallower = (data.draw(st.integers(1, depth)), context)
    fewer = (*rows[:index], shallower, *rows[index + 1 :])
    before, after = (limit_speedup(shape, [as_step(r, 1)]) for r in (rows, fewer))
    assert after >= before


@given(depth=st.integers(1, 4), checks=st.integers(0, 3), context=st.integers(0, 100))
def test_a_token_alone_costs_what_its_step_reads(depth: int, checks: int, context: int) -> None:
    """`TokenCosts` says for one token what `step_bytes` says for its step, as a share."""
    one = step(depth, contexts=(context,), checks=checks)
    share = step_bytes(TINY, one) / step_bytes(TINY, full_depth(TINY, one))
    costs = roofline(TINY, BYTES, context, 1).of_tokens(1)
    assert costs.of(depth, checks, float(depth == 4)) == pytest.approx(share)


def test_float32_checkpoints_are_served_in_half() -> None:
    assert serving_dtype({"dtype": "float32"}, None) == "bfloat16"
    assert serving_dtype({"torch_dtype": "float16"}, "auto") == "float16"
    assert serving_dtype({}, "float32") == "float32"
