"""Compaction in Triton against PyTorch: exact, for it only moves numbers."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exitserve_kernels.compact_rows import Batch, Compacted, compact_rows
from exitserve_kernels.testing import poisoned_allocations


def batch_of(sizes: list[int], width: int, blocks: int, device: torch.device) -> Batch:
    """Rows with so many tokens each, all of whose numbers differ."""
    tokens = sum(sizes)
    starts = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0).to(torch.int32)
    cached = torch.arange(len(sizes) * blocks, dtype=torch.int32).view(len(sizes), blocks)
    return Batch(
        states=torch.arange(tokens * width, dtype=torch.float32, device=device).view(tokens, width),
        positions=torch.arange(tokens, device=device) + 100,
        slots=torch.arange(tokens, device=device) + 1000,
        starts=starts.to(device),
        lengths=torch.arange(len(sizes), dtype=torch.int32, device=device) + 10,
        blocks=cached.to(device) + 7,
    )


def both(exits: torch.Tensor, batch: Batch) -> tuple[Compacted, Compacted]:
    with poisoned_allocations():
        fused = compact_rows(exits, batch, implementation="triton")
    return fused, compact_rows(exits, batch, implementation="torch")


def assert_same(fused: Compacted, plain: Compacted) -> None:
    for name, one, other in zip(Batch._fields, fused.batch, plain.batch, strict=True):
        assert torch.equal(one, other), name
    assert torch.equal(fused.rows, plain.rows)
    assert torch.equal(fused.num_left, plain.num_left)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=20),
    width=st.integers(1, 40),
    blocks=st.integers(1, 5),
)
def test_rows_that_are_left_come_first_and_whole(
    device: torch.device, rows: list[tuple[int, bool]], width: int, blocks: int
) -> None:
    sizes, leaving = [size for size, _ in rows], [leaves for _, leaves in rows]
    batch = batch_of(sizes, width, blocks, device)
    exits = torch.tensor(leaving, device=device)
    fused, plain = both(exits, batch)
    assert_same(fused, plain)
    # And by hand: each row left has its own tokens, in order.
    kept = [row for row, leaves in enumerate(leaving) if not leaves]
    assert fused.num_left.item() == len(kept)
    assert fused.rows.tolist() == kept + [-1] * (len(rows) - len(kept))
    for place, row in enumerate(kept):
        old = slice(int(batch.starts[row]), int(batch.starts[row + 1]))
        new = slice(int(fused.batch.starts[place]), int(fused.batch.starts[place + 1]))
        assert torch.equal(fused.batch.states[new], batch.states[old])
        assert torch.equal(fused.batch.slots[new], batch.slots[old])
        assert torch.equal(fused.batch.blocks[place], batch.blocks[row])


@pytest.mark.parametrize("leaving", [True, False])
def test_all_or_none_exit(leaving: bool, device: torch.device) -> None:
    batch = batch_of([1, 3, 1], 8, 2, device)
    fused, plain = both(torch.full((3,), leaving, device=device), batch)
    assert_same(fused, plain)
    if leaving:
        assert fused.num_left.item() == 0
        assert fused.batch.slots.tolist() == [-1] * 5, "nothing may be written to the cache"
        assert fused.batch.starts.tolist() == [0] * 4
    else:
        assert all(torch.equal(a, b) for a, b in zip(fused.batch, batch, strict=True))


def test_strided_states_and_blocks(device: torch.device) -> None:
    batch = batch_of([1, 2, 1, 1], 6, 3, device)
    apart = torch.full((5, 12), torch.nan, device=device)[:, ::2]
    apart.copy_(batch.states)
    wide = torch.zeros(4, 9, dtype=torch.int32, device=device)[:, :3]
    wide.copy_(batch.blocks)
    exits = torch.tensor([False, True, False, True], device=device)
    own = compact_rows(exits, batch._replace(states=apart, blocks=wide), implementation="triton")
    assert_same(own, compact_rows(exits, batch, implementation="torch"))


def test_many_rows(device: torch.device) -> None:
    batch = batch_of([1] * 700, 4, 2, device)
    exits = torch.rand(700, generator=torch.Generator().manual_seed(0)) < 0.5
    assert_same(*both(exits.to(device), batch))


def test_empty_batch(device: torch.device) -> None:
    batch = batch_of([], 4, 2, device)
    found = compact_rows(torch.zeros(0, dtype=torch.bool, device=device), batch)
    assert found.num_left.item() == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_one_graph_serves_every_mask(device: torch.device) -> None:
    batch = batch_of([1] * 16, 32, 2, device)
    exits = torch.zeros(16, dtype=torch.bool, device=device)
    compact_rows(exits, batch, implementation="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = compact_rows(exits, batch, implementation="triton")
    for share in (0.0, 0.3, 1.0):
        exits.copy_(torch.rand(16, device=device) < share)
        graph.replay()
        assert_same(found, compact_rows(exits, batch, implementation="torch"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"starts": torch.zeros(2, dtype=torch.int32)},
            r"starts has shape \(2,\); expected \(4,\)",
        ),
        ({"blocks": torch.zeros(2, 2, dtype=torch.int32)}, r"must be \[T, D\] and \[3, M\]"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    batch = batch_of([1, 1, 1], 4, 2, torch.device("cpu"))
    exits = torch.zeros(3, dtype=torch.bool)
    with pytest.raises(ValueError, match=message):
        compact_rows(exits, batch._replace(**change))
    with pytest.raises(ValueError, match=r"exits is torch.float32 of shape \(3,\); expected bool"):
        compact_rows(exits.float(), batch)
