"""K/V propagation: frozen rows fill the cache of every layer that they skip.

One GEMM of a library computes all keys and values from the normalised state (`normalised`, then
the stacked weights of the layers). `fill` does the rest in one pass: key norm, rotary embedding,
and the write into each layer's paged cache. Caches with a layout of their own, such as one packed
for a CPU's attention, implement `KVStore`.

Shapes: N rows, S layers filled, H kv heads, P head size, R rotated part of it.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from exitserve_kernels.dispatch import Asked, choose
from exitserve_kernels.propagate_kv import reference
from exitserve_kernels.propagate_kv.reference import keys_and_values, normalised

__all__ = ["Caches", "KVStore", "KeyNorm", "Rotary", "fill", "keys_and_values", "normalised"]

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


class KVStore(Protocol):
    """Takes the keys and values of S layers."""

    layers: int
    """S."""
    heads: int
    """H."""
    head_size: int
    """P."""

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Writes keys and values [N, S, H, P] at slots [N], or [S, N] if layers differ."""


class KeyNorm(NamedTuple):
    """A root-mean-square norm of the keys."""

    gains: Tensor
    """[S, P] to norm each head, or [S, H * P] to norm all heads of a token together."""
    epsilon: float


class Rotary:
    """A rotary embedding in vLLM's layout."""

    def __init__(self, tables: Sequence[Tensor], *, interleaved: bool = False) -> None:
        """Takes the angles.

        Args:
            tables: for each of S layers [positions, R]: cosines, then sines; contiguous, of one
                type and width. Layers may share one.
            interleaved: pairs are neighbours (GPT-J); otherwise R / 2 apart (NeoX).
        """
        assert len({(table.dtype, *table.shape[1:]) for table in tables}) == 1, "tables are alike"
        assert all(table.is_contiguous() for table in tables)
        self.tables, self.interleaved = list(tables), interleaved
        self.addresses = _addresses(self.tables)
        shared = {id(table): table for table in self.tables}
        order = list(shared)
        which = [order.index(id(table)) for table in self.tables]
        self._shared = list(shared.values())
        self._which = torch.tensor(which, device=tables[0].device)

    def angles(self, positions: Tensor) -> Tensor:
        """Cosines and sines of positions [N]: [N, S, R], or [N, 1, R] where layers share them."""
        found = [table[positions] for table in self._shared]
        if len(found) == 1:
            return found[0][:, None]
        return torch.stack(found, dim=1)[:, self._which]


class Caches:
    """The paged caches of S layers, all of the same shape and strides."""

    def __init__(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> None:
        """Takes views of the caches.

        Args:
            keys: for each layer [blocks, block size, H, P], with any strides. For vLLM's caches
                [blocks, H, block size, 2 * P] (FlashAttention and Triton backends):
                `cache.transpose(1, 2).split(P, dim=-1)[0]`.
            values: the same for values.
            key_scales: [S, H] float32; keys are divided by them, for caches of 8 bits.
            value_scales: the same for values.
        """
        assert len(keys) == len(values), "keys and values of the same layers"
        first = keys[0]
        for cache in (*keys, *values):
            same = cache.shape == first.shape and cache.stride() == first.stride()
            assert same and cache.dtype == first.dtype and cache.dim() == 4, "caches are alike"
        self.keys, self.values = list(keys), list(values)
        self.layers, self.heads, self.head_size = len(keys), first.shape[2], first.shape[3]
        self.key_scales, self.value_scales = key_scales, value_scales
        # Kernels reach each layer's cache by its address: keys, then values.
        self.addresses = _addresses([*self.keys, *self.values])

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """See `KVStore`; rows with a negative slot write nothing."""
        reference.write(keys, values, slots, self)


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors' addresses, on their device; created once, so that CUDA graphs may read them."""
    found = [tensor.data_ptr() for tensor in tensors]
    return torch.tensor(found, dtype=torch.int64, device=tensors[0].device)


def fill(
    projected: Tensor,
    positions: Tensor,
    slots: Tensor,
    caches: Caches | KVStore,
    *,
    key_norm: KeyNorm | None = None,
    rotary: Rotary | None = None,
    implementation: Asked = "auto",
) -> None:
    """Writes keys and values of N rows into the caches of S layers.

    Args:
        projected: [N, S, 2, H * P], keys first: the output of the stacked weights.
        positions: [N] int64, of each row's token in its text.
        slots: [N] int64, block * block size + offset, or [S, N] if layers keep a row in different
            blocks; a row with a negative slot writes nothing.
        caches: where to write; other elements do not change. Only `Caches` has a fused form.
        key_norm: applied before the rotation.
        rotary: of the keys.
        implementation: `auto`, `triton` or `torch`.
    """
    _check(projected, positions, slots, caches, key_norm, rotary)
    # Other stores can only be written by their own code.
    asked = implementation if isinstance(caches, Caches) else "torch"
    form = choose("propagate_kv", projected.device, asked)
    if form == "triton" and isinstance(caches, Caches) and len(projected):
        from exitserve_kernels.propagate_kv import fused

        fused.fill(projected, positions, slots, caches, key_norm, rotary)
        return
    found = reference.keys_and_values(projected, positions, caches.heads, key_norm, rotary)
    caches.write(*found, slots)


def _check(
    projected: Tensor,
    positions: Tensor,
    slots: Tensor,
    caches: Caches | KVStore,
    key_norm: KeyNorm | None,
    rotary: Rotary | None,
) -> None:
    layers, heads, size = caches.layers, caches.heads, caches.head_size
    rows = projected.shape[0]
    assert projected.shape == (rows, layers, 2, heads * size), "projected is [N, S, 2, H * P]"
    assert positions.shape == (rows,), "positions are [N]"
    assert slots.shape in ((rows,), (layers, rows)), "slots are [N] or [S, N]"
    if key_norm is not None:
        gains = key_norm.gains.shape
        assert gains in ((layers, size), (layers, heads * size)), "gains are [S, P] or [S, H * P]"
    if rotary is not None:
        width = rotary.tables[0].shape[1]
        assert len(rotary.tables) == layers, "a rotary table for each layer"
        assert width % 2 == 0 and 0 < width <= size, "rotary tables have an even width up to P"
    if isinstance(caches, Caches) and caches.keys[0].dtype in EIGHT_BITS:
        assert caches.key_scales is not None, "caches of 8 bits need scales"
        assert caches.value_scales is not None, "caches of 8 bits need scales"
