"""K/V propagation: keys and values of all layers not run, from the frozen state.

A row that exits fills every layer above at once: one GEMM for each *span* (the layers between two
exits; spans are shared by the exits below them), then `exitserve_kernels.propagate_kv` for key
norm, rotary embedding and cache.

Shapes: N rows, S layers above an exit, D hidden, H kv heads, P head size, R rotated part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from exitserve.engine.compat.caches import layer_caches, layer_slots
from exitserve.engine.compat.weights import packed_linear
from exitserve.engine.layers.key_values import LayerKV, Norm, rotation_table
from exitserve_kernels.propagate_kv import KeyNorm, KVStore, Rotary, fill, normalised


class Propagation(nn.Module):
    """Fills the cache above an exit. A module, so that vLLM finds the caches in it (`_Above`)."""

    def __init__(
        self, read_layers: Callable[[], Sequence[LayerKV]], exit_layers: Sequence[int], longest: int
    ) -> None:
        """Takes what it needs once weights are loaded, which is when the first pass runs.

        Args:
            read_layers: reads the keys and values of all layers [L] of the decoder.
            exit_layers: the model's.
            longest: positions are below this.
        """
        super().__init__()
        self._read_layers, self._exit_layers, self._longest = read_layers, exit_layers, longest
        self._input_norm: Norm | None = None
        self._spans: dict[int, Callable[[Tensor], Tensor]] = {}
        self._above = nn.ModuleDict()

    def load(self, like: Tensor) -> None:
        """Reads the K/V weights of the layers above the first exit; does nothing if it has.

        Args:
            like: any states [N, D], for their width, type and device.
        """
        if self._above or not self._exit_layers:
            return
        layers, first = self._read_layers(), self._exit_layers[0]
        self._input_norm = layers[0].input_norm
        bounds = [*self._exit_layers, len(layers)]
        self._spans = {
            start: _projection(layers[start:end], like) for start, end in pairwise(bounds)
        }
        # vLLM shares one module between layers that agree; so do the tables.
        tables = {
            id(layer.rotary): rotation_table(layer, self._longest, like) for layer in layers[first:]
        }
        for depth in self._exit_layers:
            own = [tables[id(layer.rotary)] for layer in layers[depth:]]
            self._above[str(depth)] = _Above(layers[depth:], depth, own)

    def fill(
        self,
        state: Tensor,
        positions: Tensor,
        depth: int,
        tokens: Tensor | None = None,
        depths: Tensor | None = None,
    ) -> None:
        """Writes keys and values of every layer above `depth`.

        Args:
            state: [N, D] frozen residual-stream states.
            positions: [N].
            depth: the exit layer at which they froze; the lowest, where those differ.
            tokens: [N] indices of these rows in the forward pass; None for all of it.
            depths: [N] the exit layer of each, where those differ.
        """
        self.load(state)
        norm = self._input_norm
        if norm is not None:
            state = normalised(state, norm.epsilon, centred=norm.centred)
        parts = [project(state) for start, project in self._spans.items() if start >= depth]
        projected = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        above: Any = self._above[str(depth)]
        above.fill(projected, positions, tokens, depths)


def _projection(layers: Sequence[LayerKV], like: Tensor) -> Callable[[Tensor], Tensor]:
    """Makes keys and values of normalised states [N, D]: layer by layer, keys first."""
    weights, biases = zip(*(layer.folded(like) for layer in layers), strict=True)
    bias = torch.cat(biases)
    return packed_linear(torch.cat(weights), bias if bias.any() else None)


class _Above(nn.Module):
    """The layers above one exit: what becomes of their projected keys and values.

    On a GPU vLLM first binds small caches, captures graphs to see what they need, and lets all of
    it go: it clears `kv_cache` of every module of the model (`clear_layer_kv_caches` in
    `vllm/v1/worker/utils.py`), so that nothing of ours holds the memory either.
    """

    def __init__(
        self, layers: Sequence[LayerKV], depth: int, tables: Sequence[Tensor | None]
    ) -> None:
        super().__init__()
        self._below = torch.arange(depth, depth + len(layers))[:, None]
        """[S, 1] layers below each."""
        self._attentions = [layer.attention for layer in layers]
        self._addresses: list[int] = []
        self.kv_cache: KVStore | list[Any] = []
        norms = [layer.key_norm for layer in layers if layer.key_norm is not None]
        self._key_norm: KeyNorm | None = None
        if norms:
            assert not norms[0].centred, "key norms are root-mean-square norms"
            self._key_norm = KeyNorm(torch.stack([one.gain for one in norms]), norms[0].epsilon)
        self._rotary = _rotary(layers, tables)

    def fill(
        self,
        projected: Tensor,
        positions: Tensor,
        tokens: Tensor | None,
        depths: Tensor | None,
    ) -> None:
        """Writes `projected` [N, S * 2 * H * P] into the cache; see `Propagation.fill`."""
        caches = self._bound_caches()
        slots = layer_slots(self._attentions, tokens)
        if depths is not None:
            slots = slots.expand(caches.layers, -1).masked_fill(self._below < depths, -1)
        fill(
            projected.view(projected.shape[0], caches.layers, 2, -1),
            positions,
            slots,
            caches,
            key_norm=self._key_norm,
            rotary=self._rotary,
        )

    def _bound_caches(self) -> KVStore:
        """Looked up when other caches are bound, which is before a graph is captured."""
        addresses = [one.kv_cache.data_ptr() for one in self._attentions]
        if isinstance(self.kv_cache, list) or addresses != self._addresses:
            self.kv_cache, self._addresses = layer_caches(self._attentions), addresses
        return self.kv_cache


def _rotary(layers: Sequence[LayerKV], tables: Sequence[Tensor | None]) -> Rotary | None:
    """The rotary embedding of all layers; those without one rotate by nothing."""
    known = [(layer.rotary, table) for layer, table in zip(layers, tables, strict=True)]
    found = [(one, table) for one, table in known if table is not None]
    if not found:
        return None
    rotary, like = found[0]
    cos, sin = like.chunk(2, dim=-1)
    still = torch.cat([torch.ones_like(cos), torch.zeros_like(sin)], dim=-1)
    return Rotary(
        [still if table is None else table for table in tables],
        interleaved=not getattr(rotary, "is_neox_style", True),
    )
