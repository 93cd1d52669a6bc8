"""The exit check of a head in slices, without its ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from exitserve_kernels.exit_check import CRITERIA, check_logits

WIDTH, COLUMNS = 8, 5
ENDS = torch.tensor([3])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("ranks", [2, 4, 6, 8])  # those that vLLM's kernel knows
@pytest.mark.parametrize("exit_rows", [None, torch.tensor([0, 3, 5, 6, 9])])
def test_ranks_exchange_one_sum(
    monkeypatch: pytest.MonkeyPatch, ranks: int, rows: int, exit_rows: Tensor | None
) -> None:
    """Of a form that vLLM's own kernel takes; each rank then knows what all slices say, and where
    there are exit rows most ranks have none of them."""
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

    from exitserve.engine.layers import exit_head

    normed, weight = torch.randn(rows, WIDTH), torch.randn(ranks * COLUMNS, WIDTH)
    limits, end_limits = torch.full((rows,), 0.3), torch.full((rows,), 0.6)
    sent: list[Tensor] = []
    told: list[Tensor] = []
    kernel: Any = SimpleNamespace(
        disabled=False,
        world_size=ranks,
        fully_connected=True,
        batch_invariant=False,
        max_size=1 << 23,
    )

    def all_reduce(own: Tensor) -> Tensor:
        assert CustomAllreduce.should_custom_ar(kernel, own)
        sent.append(own)
        return told[0] if told else own

    def no_gather(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("a second collective, or a copy from the host")

    monkeypatch.setattr(exit_head, "tensor_model_parallel_all_reduce", all_reduce, raising=False)
    monkeypatch.setattr(exit_head, "tensor_model_parallel_all_gather", no_gather)
    monkeypatch.setattr(exit_head, "get_tensor_model_parallel_world_size", lambda: ranks)

    def checked(rank: int, *, as_host: bool = False) -> Any:
        monkeypatch.setattr(
            exit_head, "get_tensor_model_parallel_rank", lambda: rank, raising=False
        )
        first = rank * COLUMNS
        shard = SimpleNamespace(org_vocab_start_index=first, num_org_elements=COLUMNS)
        lm_head = SimpleNamespace(
            shard_indices=shard,
            num_embeddings_per_partition=COLUMNS,
            weight=weight[first : first + COLUMNS],
        )

        def processor(head: Any, states: Tensor, bias: Any, skip_gather: bool) -> Tensor:
            return states @ head.weight.T

        processor.org_vocab_size = len(weight)  # type: ignore[attr-defined]
        model = SimpleNamespace(output_head=lambda: lm_head, logits_processor=processor)
        head = exit_head.ExitHead(model, lambda _: None, ENDS, "max_prob", exit_rows)
        if as_host:
            pairs = list(zip(limits.tolist(), end_limits.tolist(), strict=True))
            return head.decide(normed, pairs)[0]
        head.prepare(normed.device)
        with monkeypatch.context() as captured:  # a graph takes no numbers of the host
            captured.setattr(torch, "tensor", no_gather)
            return head.check(normed, limits, end_limits)[0]

    for rank in range(ranks):
        checked(rank)
    told.append(torch.stack(sent).sum(dim=0))
    read = torch.arange(len(weight)) if exit_rows is None else exit_rows
    logits, ends = (normed @ weight.T)[:, read], torch.isin(read, ENDS).nonzero().flatten()
    truth = check_logits(
        logits, limits, criterion="max_prob", end_tokens=ends, end_thresholds=end_limits
    )
    for rank in range(ranks):
        found = checked(rank)
        torch.testing.assert_close(found.confidence, truth.confidence)
        assert torch.equal(found.exits, truth.exits)
        assert checked(rank, as_host=True) == found.exits.tolist()
    assert len(sent) == 3 * ranks, "one for each check"


ROUNDING = 1e-6
LIMIT = st.sampled_from([0.0, 0.1, 0.25, 0.4, 1 / 3, 0.5, 0.9, torch.inf])


@given(
    st.lists(st.lists(st.integers(-2, 2), min_size=COLUMNS, max_size=COLUMNS), max_size=4),
    st.lists(st.tuples(LIMIT, LIMIT), min_size=4, max_size=4),
    st.sampled_from(CRITERIA),
    st.sampled_from([[], [3], [0, 3]]),
)
def test_a_host_decides_the_same(
    rows: list[list[int]], limits: list[tuple[float, float]], criterion: str, ends: list[int]
) -> None:
    """Among few different logits, so that many tie, also with an end of sequence."""
    from exitserve.engine.layers.exit_head import ExitHead

    logits = torch.tensor(rows, dtype=torch.float32).reshape(-1, COLUMNS)
    shard = SimpleNamespace(org_vocab_start_index=0, num_org_elements=COLUMNS)
    lm_head = SimpleNamespace(shard_indices=shard, num_embeddings_per_partition=COLUMNS)
    processor = SimpleNamespace(org_vocab_size=COLUMNS)
    model = SimpleNamespace(output_head=lambda: lm_head, logits_processor=processor)
    columns = torch.tensor(ends, dtype=torch.long)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("world_size", 1), ("rank", 0)):
            patch.setattr(
                f"exitserve.engine.layers.exit_head.get_tensor_model_parallel_{name}",
                lambda value=value: value,
            )
        head = ExitHead(model, lambda normed: normed, columns, criterion, None)
    limits = limits[: len(rows)]
    exits, kept = head.decide(logits, limits)
    truth, _ = head.check(logits, *torch.tensor(limits).reshape(-1, 2).unbind(dim=-1))
    assert kept is logits
    # Both are float32, computed in another order; entropy is a difference.
    rows_found = zip(exits, truth.exits.tolist(), truth.confidence.tolist(), limits, strict=True)
    for own, other, confidence, both in rows_found:
        assert own == other or any(abs(confidence - limit) < ROUNDING for limit in both)


def test_kernels_and_drafts_read_a_copy_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are numbers of the vocabulary again, and logits of others are -inf."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    from exitserve.engine.layers import exit_head

    weight, normed = torch.randn(40, WIDTH), torch.randn(6, WIDTH)
    rows = torch.tensor([1, 3, 8, 20, 39])
    shard = SimpleNamespace(org_vocab_start_index=0, num_org_elements=40)
    lm_head = SimpleNamespace(
        shard_indices=shard,
        num_embeddings_per_partition=64,
        weight=torch.cat([weight, torch.zeros(24, WIDTH)]),  # padding
        quant_method=UnquantizedEmbeddingMethod(),
    )
    processor = SimpleNamespace(
        org_vocab_size=40, logits_as_input=False, head_dtype=None, soft_cap=2.0, scale=0.5
    )
    model = SimpleNamespace(output_head=lambda: lm_head, logits_processor=processor)
    for name, value in (("world_size", 1), ("rank", 0)):
        monkeypatch.setattr(
            exit_head, f"get_tensor_model_parallel_{name}", lambda value=value: value
        )
    logits = 0.5 * 2.0 * torch.tanh(normed @ weight.T / 2.0)
    limits, found = torch.full((6,), 0.3), []
    for implementation in ("torch", "triton"):
        monkeypatch.setattr(exit_head, "choose", lambda *_, told=implementation: told)
        head = exit_head.ExitHead(model, lambda _: logits, ENDS, "max_prob", rows)
        assert head.draft(normed).tolist() == rows[logits[:, rows].argmax(dim=-1)].tolist()
        decision, read = head.check(normed, limits, limits)
        found.append(decision.exits)
        torch.testing.assert_close(decision.confidence, logits[:, rows].softmax(-1).amax(-1))
        torch.testing.assert_close(read, logits[:, rows])
        assert head.decide(normed, [(0.3, 0.3)] * 6)[0] == decision.exits.tolist()
        (full,) = head.logits_of(read, [4])
        assert full.isneginf().sum() == 40 - len(rows)
        room = torch.zeros(6, 40)
        head.put(read, decision.exits, room)
        assert room[~decision.exits].eq(0.0).all()
        assert (
            room[decision.exits].argmax(-1).tolist() == head.draft(normed)[decision.exits].tolist()
        )
    assert torch.equal(*found)
