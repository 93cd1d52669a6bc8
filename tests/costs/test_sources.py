"""Costs of a model's parts, on this machine or by a table."""

from __future__ import annotations

import pytest
import torch

from exitserve.costs.sources import rows_to_time, step_costs

from ..shapes import LLAMA_3_8B, TINY


def test_rows_are_timed_at_powers_of_two_and_at_the_sizes_themselves() -> None:
    assert rows_to_time([6, 1]) == (1, 2, 4, 6)
    assert rows_to_time([1]) == (1,)


def test_quantised_and_sliding_checkpoints_are_told_apart() -> None:
    config = {**LLAMA_3_8B, "quantization_config": {"bits": 8}, "sliding_window": 1024}
    short, long = (step_costs(config, device="h200", context=n).notes for n in (512, 4096))
    assert len(short) == 2
    assert len(long) == 3


def test_costs_for_calibration() -> None:
    table = step_costs(LLAMA_3_8B, device="h200").costs.of_tokens(1)
    assert table.check / table.layer == pytest.approx(0.385, abs=0.01)
    assert table.of(8, checks=1, stays=0) == pytest.approx(1 / 2.99, rel=0.01)
    timed = step_costs(TINY).costs.of_tokens(1)
    assert min(timed.layer, timed.fill, timed.check, timed.head) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_timed_from_graphs() -> None:
    """Memory is read at a GPU's rate, and a layer of 400 MB not faster than that."""
    found = step_costs(LLAMA_3_8B, batch_sizes=(1, 8), context=1024)
    assert found.details["threads"] == 0
    assert found.details["bandwidth"] > 1e11
    assert found.costs.matrices(1) > 0.5 * found.shape.layer_bytes / found.details["bandwidth"]
