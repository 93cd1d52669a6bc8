"""K/V propagation: keys and values of all layers not run, from the frozen state.

All layers between two exits, a *span*, are one GEMM on one normalised state, one rotary pass for
each rotary embedding, and one cache write where the backend keeps the layers' caches in a row.
A row that exits fills every span above it at once and is done.

Shapes: N rows, S layers of a span, D hidden, H kv heads, P head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from exitserve.engine.compat import CacheWriter, packed_linear
from exitserve.engine.keyvalue import LayerKV, Norm


class Span:
    """The layers between two exits."""

    def __init__(self, layers: Sequence[LayerKV], like: Tensor) -> None:
        attention = layers[0].attention
        self.size = len(layers)
        self.heads: int = attention.num_kv_heads
        self.head_size: int = attention.head_size
        weights, biases = zip(*(layer.folded(like) for layer in layers), strict=True)
        bias = torch.cat(biases)
        self.project = packed_linear(torch.cat(weights), bias if bias.any() else None)
        key_norms = [layer.key_norm for layer in layers if layer.key_norm is not None]
        self.key_norm: Norm | None = key_norms[0] if key_norms else None
        if self.key_norm is not None:
            self.key_gain = torch.stack([norm.gain for norm in key_norms])  # [S, P or H * P]
        self.rotaries = _grouped([layer.rotary for layer in layers])
        self.cache = CacheWriter([layer.attention for layer in layers])

    def fill(self, normalised: Tensor, positions: Tensor, tokens: Tensor | None) -> None:
        """Writes keys and values of the span's layers.

        Args:
            normalised: [N, D] frozen states without the input norm's gain.
            positions: [N].
            tokens: [N] indices in the forward pass, None for all of it.
        """
        rows = normalised.shape[0]
        kv = self.project(normalised).view(rows, self.size, 2, self.heads * self.head_size)
        keys, values = kv[:, :, 0], kv[:, :, 1]
        if self.key_norm is not None:
            keys = self._normed(keys)
        keys = self._rotated(keys, positions)
        shape = (rows, self.size, self.heads, self.head_size)
        self.cache.write(keys.view(shape), values.view(shape), tokens)

    def _normed(self, keys: Tensor) -> Tensor:
        """Key norm over [N, S, H * P]: over each head, or all heads together."""
        assert self.key_norm is not None
        grouped = keys.reshape(*keys.shape[:2], -1, self.key_gain.shape[-1])
        normed = self.key_norm.normalise(grouped) * self.key_gain[:, None]
        return normed.flatten(-2).to(keys.dtype)

    def _rotated(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Rotates [N, S, H * P]; all layers with one embedding pass as heads of one tensor."""
        keys = keys.contiguous()
        # Some rotary embeddings insist on a query; one head of zeros will do.
        query = keys.new_zeros(keys.shape[0], self.head_size)
        for rotary, layers in self.rotaries:
            if rotary is None:
                continue
            some = keys if len(layers) == self.size else keys[:, layers]
            rotated = rotary(positions, query, some.flatten(1).contiguous())[1]
            if len(layers) == self.size:
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


class Propagation:
    """Fills the cache above an exit, span by span."""

    def __init__(self, layers: Sequence[LayerKV], exit_layers: Sequence[int], like: Tensor) -> None:
        """Takes the K/V weights of the layers above the first exit.

        Args:
            layers: [L] all layers of the decoder, loaded.
            exit_layers: at least one.
            like: any states [N, D], for their width, type and device.
        """
        self.input_norm = layers[0].input_norm
        bounds = [*exit_layers, len(layers)]
        self.spans = {start: Span(layers[start:end], like) for start, end in pairwise(bounds)}

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
        if self.input_norm is not None:
            normalised = self.input_norm.normalise(state).to(state.dtype)
        for start, span in self.spans.items():
            if start >= depth:
                span.fill(normalised, positions, tokens)
