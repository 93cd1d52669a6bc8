"""The forward context that the engine makes for attention, without a GPU."""

from __future__ import annotations

from typing import Any

import torch


def test_frozen_rows_read_one_key_instead_of_all() -> None:
    from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
    from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata

    from exitserve.engine.compat.context import without_reading_for

    nothing = torch.empty(0)
    lengths = torch.tensor([900, 7, 8000, 0], dtype=torch.int32)
    metadata: Any = TritonAttentionMetadata(
        4, 1, nothing, 8192, lengths, nothing, nothing, 0, 0, nothing, nothing, nothing, True
    )
    metadata.scheduler_metadata = torch.ones(4)
    base: Any = ForwardContext(
        no_compile_layers={}, attn_metadata={"a": metadata, "b": metadata}, slot_mapping={}
    )
    frozen = torch.tensor([[True], [False], [True], [True]])  # the last is padding
    with override_forward_context(base):
        with without_reading_for(frozen):
            inside: Any = get_forward_context().attn_metadata
            assert inside["a"] is inside["b"]
            assert inside["a"].seq_lens.tolist() == [1, 7, 1, 0]
            assert inside["a"].seq_lens.dtype == torch.int32
            assert inside["a"].scheduler_metadata is None
        assert get_forward_context() is base
        assert metadata.seq_lens is lengths
        metadata.max_query_len = 5  # a prompt is among them
        with without_reading_for(frozen):
            assert get_forward_context() is base
