"""Every kind of shape can be timed."""

from typing import Any

import pytest

from exitserve.costs.sources import step_costs
from exitserve.costs.timing import time_step

TINY: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "multi_exit": {"version": 1, "exit_layers": [1, 2]},
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_type_can_be_timed(dtype: str) -> None:
    shape = step_costs(TINY, dtype=dtype, device=None).shape
    found = time_step(shape, dtype, (1, 2), 16)
    assert found.costs.full(2) > 0
    assert found.bandwidth > 1e8
    assert found.unsteadiness >= 1


def test_a_plain_feed_forward_block_can_be_timed() -> None:
    gpt2 = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 64}
    assert step_costs(gpt2).costs.full(1) > 0
