"""Every kind of shape can be timed."""

import pytest

from exitserve.costs.sources import step_costs
from exitserve.costs.timing import time_step

from ..shapes import TINY


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_type_can_be_timed(dtype: str) -> None:
    shape = step_costs(TINY, dtype=dtype, device=None).shape
    costs, found = time_step(shape, dtype, (1, 2), 16)
    assert costs.full(2) > 0
    assert found["bandwidth"] > 1e8
    assert found["unsteadiness"] >= 1


def test_a_plain_feed_forward_block_can_be_timed() -> None:
    gpt2 = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 64}
    assert step_costs(gpt2).costs.full(1) > 0
