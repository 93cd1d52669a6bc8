"""K/V propagation in Triton against float64, for vLLM's cache layout and every option."""

import math
from typing import Any

import pytest
import torch

from exitserve_kernels.propagate_kv import Caches, KeyNorm, Rotary, fill

from .testing import assert_no_worse

BLOCKS, BLOCK_SIZE, LAYERS = 7, 4, 3


def caches_of(
    heads: int, size: int, dtype: torch.dtype, device: torch.device, *, scaled: bool = False
) -> Caches:
    """Views of caches as vLLM 0.32 has them: [blocks, H, block size, 2 * P], filled with 7."""
    keys, values = [], []
    for _ in range(LAYERS):
        whole = torch.full((BLOCKS, heads, BLOCK_SIZE, 2 * size), 7.0, device=device).to(dtype)
        key, value = whole.transpose(1, 2).split(size, dim=-1)
        keys.append(key)
        values.append(value)
    if not scaled:
        return Caches(keys, values)
    scales = torch.linspace(0.5, 2.0, LAYERS * heads, device=device).view(LAYERS, heads)
    return Caches(keys, values, scales, scales.flip(1).contiguous())


def inputs(
    rows: int, heads: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + heads)
    projected = torch.randn(rows, LAYERS, 2, heads * size, generator=generator)
    positions = torch.randint(0, 50, (rows,), generator=generator)
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=generator)[:rows]
    return projected.to(device, dtype), positions.to(device), slots.to(device)


def options_of(
    name: str, heads: int, size: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    width = size if "partial" not in name else size // 2
    angles = torch.rand(LAYERS, 50, width // 2, generator=generator) * 6.0
    tables = torch.cat([angles.cos(), angles.sin()], dim=-1).to(device, dtype)
    found: dict[str, Any] = {}
    if "rotary" in name:
        found["rotary"] = Rotary(list(tables), interleaved="interleaved" in name)
    if "norm" in name:
        gains = torch.rand(LAYERS, heads * size if "all heads" in name else size) + 0.5
        found["key_norm"] = KeyNorm(gains.to(device, dtype), 1e-5)
    return found


def exactly(options: dict[str, Any]) -> dict[str, Any]:
    """The same options in float64."""
    found: dict[str, Any] = {}
    if "rotary" in options:
        tables = [table.double() for table in options["rotary"].tables]
        found["rotary"] = Rotary(tables, interleaved=options["rotary"].interleaved)
    if "key_norm" in options:
        found["key_norm"] = KeyNorm(options["key_norm"].gains.double(), 1e-5)
    return found


OPTIONS = [
    "plain",
    "rotary",
    "rotary interleaved",
    "rotary partial",
    "rotary partial interleaved",
    "norm, rotary",
    "norm of all heads, rotary",
    "norm",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_caches_hold_what_the_reference_writes(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    for heads, size, rows in ((2, 8, 5), (3, 20, 1), (1, 16, 9)):
        projected, positions, slots = inputs(rows, heads, size, dtype, device)
        slots[rows // 2] = -1
        options = options_of(name, heads, size, dtype, device)
        fused, plain = (caches_of(heads, size, dtype, device) for _ in range(2))
        exact = caches_of(heads, size, torch.float64, device)
        fill(projected, positions, slots, fused, implementation="triton", **options)
        fill(projected, positions, slots, plain, implementation="torch", **options)
        fill(
            projected.double(), positions, slots, exact, implementation="torch", **exactly(options)
        )
        for own, other, truth in zip(
            [*fused.keys, *fused.values],
            [*plain.keys, *plain.values],
            [*exact.keys, *exact.values],
            strict=True,
        ):
            assert_no_worse(own, other, truth)
            # Slots that nobody filled are as they were.
            assert torch.equal(own == 7.0, truth == 7.0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_caches_of_eight_bits(dtype: torch.dtype, device: torch.device) -> None:
    projected, positions, slots = inputs(6, 2, 8, torch.bfloat16, device)
    projected[0, 0] = 1e9  # beyond the type: its greatest number, not NaN
    options = options_of("norm, rotary", 2, 8, torch.bfloat16, device)
    fused, plain = (caches_of(2, 8, dtype, device, scaled=True) for _ in range(2))
    fill(projected, positions, slots, fused, implementation="triton", **options)
    fill(projected, positions, slots, plain, implementation="torch", **options)
    for own, other in zip([*fused.keys, *fused.values], [*plain.keys, *plain.values], strict=True):
        one, two = own.float(), other.float()
        assert torch.equal(one.isfinite(), two.isfinite())
        # A value on an edge may round to its neighbour, up to a quarter away; few lie on one.
        assert float((one != two).double().mean()) < 0.05
    assert fused.values[0].float().abs().max() == torch.finfo(dtype).max


def test_nan_stays_in_its_row(device: torch.device) -> None:
    projected, positions, slots = inputs(4, 2, 8, torch.float32, device)
    projected[2] = math.nan
    caches = caches_of(2, 8, torch.float32, device)
    options = options_of("norm, rotary", 2, 8, torch.float32, device)
    fill(projected, positions, slots, caches, implementation="triton", **options)
    bad = torch.zeros(BLOCKS, BLOCK_SIZE, dtype=torch.bool, device=device)
    bad[slots[2] // BLOCK_SIZE, slots[2] % BLOCK_SIZE] = True
    for cache in (*caches.keys, *caches.values):
        assert torch.equal(cache.isnan().any(-1).any(-1), bad)
        assert torch.equal(cache.isnan().all(-1).all(-1), bad)


def test_strided_projections(device: torch.device) -> None:
    projected, positions, slots = inputs(5, 2, 8, torch.float32, device)
    wide = torch.full((5, LAYERS + 2, 2, 16), math.nan, device=device)
    wide[:, 1:-1] = projected
    one, two = (caches_of(2, 8, torch.float32, device) for _ in range(2))
    fill(wide[:, 1:-1], positions, slots, one, implementation="triton")
    fill(projected, positions, slots, two, implementation="triton")
    assert all(torch.equal(a, b) for a, b in zip(one.keys, two.keys, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_runs_in_a_cuda_graph(device: torch.device) -> None:
    projected, positions, slots = inputs(6, 2, 8, torch.bfloat16, device)
    options = options_of("norm, rotary", 2, 8, torch.bfloat16, device)
    eager, captured = (caches_of(2, 8, torch.bfloat16, device) for _ in range(2))
    fill(projected, positions, slots, eager, implementation="triton", **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill(projected, positions, slots, captured, implementation="triton", **options)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(eager.keys, captured.keys, strict=True))
