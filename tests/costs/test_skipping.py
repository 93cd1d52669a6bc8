"""By hand, against derived tables of public shapes, and what must hold always."""

from __future__ import annotations

import dataclasses
from math import comb
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitserve.costs.byte_costs import (
    DecoderShape,
    DecodeStep,
    full_depth,
    limit_speedup,
    shape_of,
    step_bytes,
)
from exitserve.costs.curves import Curve, StepCosts
from exitserve.costs.devices import Device, roofline
from exitserve.costs.skipping import break_even_share, expected_seconds, speedup

from ..shapes import LLAMA_3_8B, QWEN_3_0_6B

CONFIGS: dict[str, dict[str, Any]] = {
    "GPT-2": {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257},
    "Qwen3-0.6B": QWEN_3_0_6B,
    "Qwen3-4B": {
        "num_hidden_layers": 36,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "Llama-3-8B": LLAMA_3_8B,
}

ENDLESS = Device(bandwidth=4.8e12, peak=float("inf"))
"""An H200 bound by memory only."""


def shape(name: str) -> DecoderShape:
    return shape_of(CONFIGS[name], "bfloat16")


def by_bytes(name: str, largest: int = 1, context: int = 0) -> StepCosts:
    """Costs that are bytes read, at the bandwidth of an H200."""
    return roofline(shape(name), ENDLESS, context, largest)


def curve(first: float, more: float, largest: int = 64) -> Curve:
    """`first` seconds for a row, `more` for each further one."""
    return Curve(((1, first), (largest, first + more * (largest - 1))))


# Ten layers; a layer takes 10 for a row and 1 for each further one.
SIMPLE = StepCosts(
    num_layers=10,
    matrices=curve(9.0, 0.5),
    attention=curve(1.0, 0.5),
    fill=curve(1.0, 0.0),
    check=curve(12.0, 0.0),
    head=curve(11.0, 0.0),
    rest=curve(5.0, 0.0),
    exits=curve(2.0, 0.0),
)


def test_full_depth_by_hand() -> None:
    assert SIMPLE.full(1) == 5 + 10 * 10 + 11
    assert SIMPLE.full(3) == 5 + 10 * 12 + 11


def test_one_row_that_leaves_half_of_the_time_by_hand() -> None:
    """Four layers and a check, then six fills, or six layers and the head."""
    found = expected_seconds(SIMPLE, 1, {4: 0.5}, compacts=True)
    assert found == pytest.approx(5 + 2 + 40 + 12 + 0.5 * 6 + 0.5 * (60 + 11))


def test_two_rows_compacted_and_masked_by_hand() -> None:
    """Each leaves half of the time: both stay, one stays, or none (1/4, 1/2, 1/4)."""
    ahead = 5 + 2 + 4 * 11 + 12
    compacted = expected_seconds(SIMPLE, 2, {4: 0.5}, compacts=True)
    assert compacted == pytest.approx(ahead + 6 * (0.25 * 11 + 0.5 * 10) + 0.75 * 11 + 6 * 0.75 * 1)
    masked = expected_seconds(SIMPLE, 2, {4: 0.5}, compacts=False)
    attention = 0.25 * 1.5 + 0.5 * 1.0
    assert masked == pytest.approx(ahead + 6 * (0.75 * 9.5 + attention) + 0.75 * 11 + 6 * 0.25 * 1)


def test_two_exit_layers_by_hand() -> None:
    found = expected_seconds(SIMPLE, 1, {2: 0.3, 5: 0.5}, compacts=True)
    first = 20 + 12 + 0.3 * 8
    second = 0.7 * (30 + 12) + 0.5 * 5
    assert found == pytest.approx(7 + first + second + 0.2 * (50 + 11))


def test_no_exits_are_full_depth() -> None:
    assert expected_seconds(SIMPLE, 4, {}, compacts=True) == SIMPLE.full(4)


@pytest.mark.parametrize(
    ("name", "layers", "milliseconds"),
    [
        ("GPT-2", 0.44, 0.05),
        ("Qwen3-0.6B", 0.27, 0.25),
        ("Qwen3-4B", 0.21, 1.68),
        ("Llama-3-8B", 0.15, 3.13),
    ],
)
def test_a_check_in_layers_and_the_time_of_a_token(
    name: str, layers: float, milliseconds: float
) -> None:
    """Derived figures of public models: bfloat16, 4.8 TB/s."""
    costs = by_bytes(name)
    assert costs.check_in_layers(1) == pytest.approx(layers, abs=0.006)
    assert 1e3 * costs.full(1) == pytest.approx(milliseconds, abs=0.006)


@pytest.mark.parametrize(
    ("name", "layer", "best", "even", "half", "most"),
    [
        ("GPT-2", 6, 2.34, 0.04, 1.38, 1.83),
        ("Qwen3-0.6B", 7, 3.76, 0.01, 1.57, 2.42),
        ("Qwen3-0.6B", 14, 2.35, 0.01, 1.40, 1.84),
        ("Qwen3-4B", 9, 3.76, 0.01, 1.57, 2.42),
        ("Qwen3-4B", 18, 2.08, 0.01, 1.35, 1.71),
        ("Llama-3-8B", 8, 3.79, 0.01, 1.58, 2.43),
        ("Llama-3-8B", 16, 2.05, 0.01, 1.34, 1.69),
        ("Llama-3-8B", 24, 1.41, 0.02, 1.17, 1.30),
    ],
)
def test_one_exit_of_public_models(
    name: str, layer: int, best: float, even: float, half: float, most: float
) -> None:
    costs = by_bytes(name)
    found = [speedup(costs, 1, {layer: share}, compacts=True) for share in (1.0, 0.5, 0.8)]
    assert found == pytest.approx([best, half, most], abs=0.0051)
    assert break_even_share(costs, 1, layer, compacts=True) == pytest.approx(even, abs=0.0051)


names = st.sampled_from(sorted(CONFIGS))
shares = st.floats(0.0, 1.0)


@given(name=names, data=st.data())
def test_break_even_is_where_the_speedup_is_one(name: str, data: st.DataObject) -> None:
    costs = by_bytes(name)
    layer = data.draw(st.integers(1, costs.num_layers - 1))
    found = break_even_share(costs, 1, layer, compacts=True)
    one = shape(name)
    saved = (one.num_layers - layer) * (one.layer_bytes - one.kv_projection_bytes)
    assert found == pytest.approx(one.check_bytes / (one.head_bytes + saved), abs=1e-6)
    assert speedup(costs, 1, {layer: found}, compacts=True) == pytest.approx(1.0, abs=1e-6)


@given(batch=st.integers(1, 64), layer=st.integers(1, 9), compacts=st.booleans())
def test_break_even_at_any_batch(batch: int, layer: int, compacts: bool) -> None:
    found = break_even_share(SIMPLE, batch, layer, compacts=compacts)
    if found is None:
        assert speedup(SIMPLE, batch, {layer: 1.0}, compacts=compacts) < 1.0
    else:
        at_even = speedup(SIMPLE, batch, {layer: found}, compacts=compacts)
        assert at_even == pytest.approx(1.0, abs=1e-3)


@given(
    name=names,
    batch=st.integers(1, 32),
    context=st.integers(0, 4096),
    compacts=st.booleans(),
    share=shares,
    data=st.data(),
)
def test_never_above_the_limit_by_bytes(
    name: str, batch: int, context: int, compacts: bool, share: float, data: st.DataObject
) -> None:
    """Where memory is all that counts, no mix beats the step in which every row leaves."""
    costs = by_bytes(name, batch, context)
    layer = data.draw(st.integers(1, costs.num_layers - 1))
    step = DecodeStep(depths=(layer,) * batch, contexts=(context,) * batch, checks=1)
    limit = limit_speedup(shape(name), [step])
    found = speedup(costs, batch, {layer: share}, compacts=compacts)
    even = break_even_share(costs, batch, layer, compacts=compacts)
    assert found <= max(1.0, limit) + 1e-9
    assert even is not None
    assert speedup(costs, batch, {layer: 1.0}, compacts=compacts) == pytest.approx(limit)


@given(name=names, batch=st.integers(1, 8), share=shares, data=st.data())
def test_a_mean_over_steps_as_the_bytes_model_counts_them(
    name: str, batch: int, share: float, data: st.DataObject
) -> None:
    """Masked, one exit: rows leave or stay; the bytes of each outcome, by their probability."""
    costs = by_bytes(name, batch, 100)
    layer = data.draw(st.integers(1, costs.num_layers - 1))
    expected = 0.0
    for stay in range(batch + 1):
        depths = (costs.num_layers,) * stay + (layer,) * (batch - stay)
        step = DecodeStep(depths=depths, contexts=(100,) * batch, checks=1)
        chance = comb(batch, stay) * (1 - share) ** stay * share ** (batch - stay)
        expected += chance * step_bytes(shape(name), step)
    plain = step_bytes(shape(name), full_depth(shape(name), step))
    found = speedup(costs, batch, {layer: share}, compacts=False)
    assert found == pytest.approx(plain / expected)


@given(
    batch=st.integers(1, 32),
    layer=st.integers(1, 9),
    compacts=st.booleans(),
    pair=st.tuples(shares, shares),
)
def test_more_exits_are_faster(
    batch: int, layer: int, compacts: bool, pair: tuple[float, float]
) -> None:
    few, many = sorted(pair)
    slow, fast = (speedup(SIMPLE, batch, {layer: one}, compacts=compacts) for one in (few, many))
    assert slow <= fast + 1e-9


@given(batch=st.integers(1, 32), layer=st.integers(1, 9), share=shares)
def test_all_that_leave_are_the_same_compacted_and_masked(
    batch: int, layer: int, share: float
) -> None:
    no_row_costs = dataclasses.replace(SIMPLE, attention=curve(0.0, 0.0))
    for one in (0.0, 1.0, share if batch == 1 else 1.0):
        ways = [speedup(no_row_costs, batch, {layer: one}, compacts=way) for way in (True, False)]
        assert ways[0] == pytest.approx(ways[1])


@given(batch=st.integers(1, 64), depth=st.integers(1, 9))
def test_costs_of_tokens_tell_the_same(batch: int, depth: int) -> None:
    """`TokenCosts` is what calibration minimises: the same step, all rows alike."""
    costs: StepCosts = dataclasses.replace(SIMPLE, exits=curve(0.0, 0.0))
    share = costs.of_tokens(batch).of(depth, checks=1, stays=0)
    assert 1 / share == pytest.approx(speedup(costs, batch, {depth: 1.0}, compacts=True))
