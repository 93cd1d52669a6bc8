"""K/V propagation: keys and values of all layers not run, from the frozen state.

A row that exits fills every layer above at once: one GEMM for each *span* (the layers between two
exits; spans are shared by the exits below them), then one key norm, one rotary pass for each
rotary embedding, and one cache write where the backend keeps the layers' caches in a row.

Shapes: N rows, S layers above an exit, D hidden, H kv heads, P head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from exitserve.engine.compat import CacheWriter, packed_linear
from exitserve.engine.keyvalue import LayerKV, Norm


class Propagation:
    """Fills the cache above an exit."""

    def __init__(self, layers: Sequence[LayerKV], exit_layers: Sequence[int], like: Tensor) -> None:
        """Takes the K/V weights of the layers above the first exit.

        Args:
            layers: [L] all layers of the decoder, loaded.
            exit_layers: at least one.
            like: any states [N, D], for their width, type and device.
        """
        self._input_norm = layers[0].input_norm
        bounds = [*exit_layers, len(layers)]
        self._spans = {
            start: _projection(layers[start:end], like) for start, end in pairwise(bounds)
        }
        self._above = {depth: _Above(layers[depth:]) for depth in exit_layers}

    def fill(
        self, state: Tensor, positions: Tensor, depth: int, tokens: Tensor | None = None
    ) -> None:
        """Writes keys and values of every layer above `depth`.

        Args:
            state: [N, D] frozen residual-stream states.
            positions: [N].
            depth: the exit layer at which they froze.
            tokens: [N] indices of these rows in the forward pass; None for all of it.
        """
        normalised = state
        if self._input_norm is not None:
            normalised = self._input_norm.normalise(state).to(state.dtype)
        parts = [project(normalised) for start, project in self._spans.items() if start >= depth]
        projected = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        self._above[depth].fill(projected, positions, tokens)


def _projection(layers: Sequence[LayerKV], like: Tensor) -> Callable[[Tensor], Tensor]:
    """Makes keys and values of normalised states [N, D]: layer by layer, keys first."""
    weights, biases = zip(*(layer.folded(like) for layer in layers), strict=True)
    bias = torch.cat(biases)
    return packed_linear(torch.cat(weights), bias if bias.any() else None)


class _Above:
    """The layers above one exit: what becomes of their projected keys and values."""

    def __init__(self, layers: Sequence[LayerKV]) -> None:
        attention = layers[0].attention
        self._size = len(layers)
        self._heads: int = attention.num_kv_heads
        self._head_size: int = attention.head_size
        key_norms = [layer.key_norm for layer in layers if layer.key_norm is not None]
        self._key_norm: Norm | None = key_norms[0] if key_norms else None
        if self._key_norm is not None:
            self._key_gain = torch.stack([norm.gain for norm in key_norms])  # [S, P or H * P]
        self._rotaries = _grouped([layer.rotary for layer in layers])
        self._cache = CacheWriter([layer.attention for layer in layers])

    def fill(self, projected: Tensor, positions: Tensor, tokens: Tensor | None) -> None:
        """Writes `projected` [N, S * 2 * H * P] into the cache; see `Propagation.fill`."""
        rows = projected.shape[0]
        kv = projected.view(rows, self._size, 2, self._heads * self._head_size)
        keys, values = kv[:, :, 0], kv[:, :, 1]
        if self._key_norm is not None:
            keys = self._normed(keys)
        keys = self._rotated(keys, positions)
        shape = (rows, self._size, self._heads, self._head_size)
        self._cache.write(keys.view(shape), values.view(shape), tokens)

    def _normed(self, keys: Tensor) -> Tensor:
        """Key norm over [N, S, H * P]: over each head, or all heads together."""
        assert self._key_norm is not None
        grouped = keys.reshape(*keys.shape[:2], -1, self._key_gain.shape[-1])
        normed = self._key_norm.normalise(grouped) * self._key_gain[:, None]
        return normed.flatten(-2).to(keys.dtype)

    def _rotated(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Rotates [N, S, H * P]; all layers with one embedding pass as heads of one tensor."""
        keys = keys.contiguous()
        # Some rotary embeddings insist on a query; one head of zeros will do.
        query = keys.new_zeros(keys.shape[0], self._head_size)
        for rotary, layers in self._rotaries:
            if rotary is None:
                continue
            some = keys if len(layers) == self._size else keys[:, layers]
            rotated = rotary(positions, query, some.flatten(1).contiguous())[1]
            if len(layers) == self._size:
                keys = rotated.view(keys.shape)
            else:
                keys[:, layers] = rotated.view(some.shape)
        return keys


def _grouped(rotaries: Sequence[Any]) -> list[tuple[Any, list[int]]]:
    """Layers by their rotary embedding; vLLM shares one module between layers that agree."""
    groups: dict[int, tuple[Any, list[int]]] = {}
    for index, rotary in enumerate(rotaries):
        groups.setdefault(id(rotary), (rotary, []))[1].append(index)
    return list(groups.values())
