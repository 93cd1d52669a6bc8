"""The forward context that the engine makes for attention, without a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

LENGTHS = torch.tensor([900, 7, 8000, 0], dtype=torch.int32)
FROZEN = torch.tensor([[True], [False], [True], [True]])  # the last is padding


def test_frozen_rows_read_one_key_instead_of_all() -> None:
    from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
    from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata

    from exitserve.engine.compat.context import without_reading_for

    nothing = torch.empty(0)
    metadata: Any = TritonAttentionMetadata(
        4, 1, nothing, 8192, LENGTHS, nothing, nothing, 0, 0, nothing, nothing, nothing, True
    )
    base: Any = ForwardContext(
        no_compile_layers={}, attn_metadata={"a": metadata, "b": metadata}, slot_mapping={}
    )
    with override_forward_context(base):
        with without_reading_for(FROZEN, ()):
            inside: Any = get_forward_context().attn_metadata
            assert inside["a"] is inside["b"]
            assert inside["a"].seq_lens.tolist() == [1, 7, 1, 0]
            assert inside["a"].seq_lens.dtype == torch.int32
        assert get_forward_context() is base
        assert metadata.seq_lens is LENGTHS
        metadata.max_query_len = 5  # a prompt is among them
        with without_reading_for(FROZEN, ()):
            assert get_forward_context() is base


@pytest.mark.parametrize("can_update", [True, False])
def test_schedules_fit_what_rows_read(monkeypatch: pytest.MonkeyPatch, can_update: bool) -> None:
    """FlashAttention 3 makes one schedule for all layers; vLLM's builder makes ours."""
    from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
    from vllm.v1.attention.backends import flash_attn

    from exitserve.engine.compat.context import without_reading_for

    made = []

    def schedule(**given: Any) -> torch.Tensor:
        made.append(given)
        return given["cache_seqlens"] + 100

    monkeypatch.setattr(flash_attn, "get_scheduler_metadata", schedule, raising=False)
    builder: Any = object.__new__(flash_attn.FlashAttentionMetadataBuilder)
    builder.__dict__ |= {
        "supports_draft_decode_metadata_update": can_update,
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "kv_cache_dtype": torch.bfloat16,
        "aot_sliding_window": (-1, -1),
        "use_full_cuda_graph": True,
        "scheduler_metadata": torch.full((8,), 3, dtype=torch.int32),
    } | dict.fromkeys(("num_heads_q", "dcp_world_size", "num_heads_kv", "headdim"), 1)
    builder.block_size = 16
    own = builder.scheduler_metadata[:4]
    nothing = torch.empty(0)
    metadata: Any = flash_attn.FlashAttentionMetadata(
        4, 1, nothing, 8192, LENGTHS, nothing, nothing, scheduler_metadata=own, max_num_splits=16
    )
    base: Any = ForwardContext(
        no_compile_layers={}, attn_metadata={"a": metadata, "b": metadata}, slot_mapping={}
    )
    group = SimpleNamespace(layer_names=["a", "b"], get_metadata_builder=lambda: builder)
    with override_forward_context(base), without_reading_for(FROZEN, [[group]]):
        inside: Any = get_forward_context().attn_metadata
        assert inside["a"] is inside["b"]
        assert inside["a"].seq_lens.tolist() == [1, 7, 1, 0]
        if not can_update:
            assert inside["a"].scheduler_metadata is None and not made
            return
        assert inside["a"].scheduler_metadata.tolist() == [101, 107, 101, 100]
        assert inside["a"].scheduler_metadata.data_ptr() == own.data_ptr(), "graphs hold it"
    (given,) = made
    assert (given["batch_size"], given["num_splits"], given["max_seqlen_q"]) == (4, 16, 1)
