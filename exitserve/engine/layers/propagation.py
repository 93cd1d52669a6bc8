"""K/V propagation: keys and values of all layers not run, from the frozen state.

A row that exits fills every layer above at once: one GEMM for each *span* (the layers between two
exits; spans are shared by the exits below them), then `exitserve_kernels.propagate_kv` for key
norm, rotary embedding and cache. On a CPU all but the write into the cache is compiled as one unit.

Shapes: N rows, S layers above an exit, D hidden, H kv heads, P head size, R rotated part of it.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from exitserve.engine.compat.caches import CacheWriter, layer_caches, layer_slots
from exitserve.engine.compat.compiled import compiled_module
from exitserve.engine.compat.weights import packed_linear
from exitserve.engine.layers.key_values import LayerKV, Norm, rotation_table
from exitserve_kernels.propagate_kv import (
    KeyNorm,
    KVStore,
    Rotary,
    fill,
    keys_and_values,
    normalised,
)


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
        self._projected = {depth: Projected() for depth in exit_layers}
        self._above = nn.ModuleDict()

    def compile_parts(self, vllm_config: Any) -> None:
        """Lets keys and values be made in one call, which is compiled where vLLM compiles."""
        self._projected = {
            depth: compiled_module(
                vllm_config,
                f"projected_from_{depth}",
                Projected,
                Projected.forward,
                ["state", "positions"],
            )
            for depth in self._exit_layers
        }

    def warm_up(self, states: Tensor) -> None:
        """Compiles that, for some states [N, D]."""
        self.load(states)
        positions = torch.zeros(len(states), dtype=torch.long, device=states.device)
        for one in self._above.values():
            one.warm_up(states, positions)  # type: ignore[operator]  # an `_Above`

    def load(self, like: Tensor) -> None:
        """Reads the K/V weights of the layers above the first exit; does nothing if it has.

        Args:
            like: any states [N, D], for their width, type and device.
        """
        if self._above or not self._exit_layers:
            return
        layers, first = self._read_layers(), self._exit_layers[0]
        bounds = [*self._exit_layers, len(layers)]
        spans = {start: _projection(layers[start:end], like) for start, end in pairwise(bounds)}
        # vLLM shares one module between layers that agree; so do the tables.
        tables = {
            id(layer.rotary): rotation_table(layer, self._longest, like) for layer in layers[first:]
        }
        for depth, projected in self._projected.items():
            own = layers[depth:]
            projected.take(
                [one for start, one in spans.items() if start >= depth],
                own,
                [tables[id(layer.rotary)] for layer in own],
            )
            self._above[str(depth)] = _Above(own, projected)

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
        self.load(state)
        above: Any = self._above[str(depth)]
        above.fill(state, positions, tokens)


def _projection(layers: Sequence[LayerKV], like: Tensor) -> Any:
    """Makes keys and values of normalised states [N, D]: layer by layer, keys first."""
    weights, biases = zip(*(layer.folded(like) for layer in layers), strict=True)
    bias = torch.cat(biases)
    return packed_linear(torch.cat(weights), bias if bias.any() else None)


class Projected(nn.Module):
    """Keys and values of all layers above an exit, from states that froze there."""

    def __init__(self, *, vllm_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.input_norm: Norm | None = None
        self.key_norm: KeyNorm | None = None
        self.rotary: Rotary | None = None

    def take(
        self, spans: Sequence[nn.Module], layers: Sequence[LayerKV], tables: Sequence[Tensor | None]
    ) -> None:
        """Takes what it needs of S layers: their weights, span by span, and rotation tables [S]."""
        self.spans: Any = nn.ModuleList(spans)
        self.layers = len(layers)
        self.heads: int = layers[0].attention.num_kv_heads
        self.input_norm, self.rotary = layers[0].input_norm, _rotary(layers, tables)
        norms = [layer.key_norm for layer in layers if layer.key_norm is not None]
        if norms:
            assert not norms[0].centred, "key norms are root-mean-square norms"
            self.key_norm = KeyNorm(torch.stack([one.gain for one in norms]), norms[0].epsilon)

    def linear(self, state: Tensor) -> Tensor:
        """[N, S, 2, H * P] of states [N, D]: keys before their norm and rotation, and values."""
        norm = self.input_norm
        if norm is not None:
            state = normalised(state, norm.epsilon, centred=norm.centred)
        parts = [one.quant_method.apply(one, state, one.bias) for one in self.spans]
        projected = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return projected.view(len(state), self.layers, 2, -1)

    def forward(self, state: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [N, S, H, P] as caches hold them, of states [N, D]."""
        projected = self.linear(state)
        keys, values = keys_and_values(projected, positions, self.heads, self.key_norm, self.rotary)
        return keys.to(values.dtype), values.contiguous()


class _Above(nn.Module):
    """The layers above one exit: what becomes of their projected keys and values.

    On a GPU vLLM first binds small caches, captures graphs to see what they need, and lets all of
    it go: it clears `kv_cache` of every module of the model (`clear_layer_kv_caches` in
    `vllm/v1/worker/utils.py`), so that nothing of ours holds the memory either.
    """

    def __init__(self, layers: Sequence[LayerKV], projected: Projected) -> None:
        super().__init__()
        self._attentions = [layer.attention for layer in layers]
        self._addresses: list[int] = []
        self.kv_cache: KVStore | list[Any] = []
        # A tuple, so that the copies of weights are no parameters of vLLM's model.
        self._projected = (projected,)

    def warm_up(self, state: Tensor, positions: Tensor) -> None:
        """See `Propagation.warm_up`."""
        self._projected[0](state, positions)

    def fill(self, state: Tensor, positions: Tensor, tokens: Tensor | None) -> None:
        """See `Propagation.fill`."""
        caches, (projected,) = self._bound_caches(), self._projected
        slots = layer_slots(self._attentions, tokens)
        if isinstance(caches, CacheWriter):
            keys, values = projected(state, positions)
            caches.write(keys, values, slots)
            return
        fill(
            projected.linear(state),
            positions,
            slots,
            caches,
            key_norm=projected.key_norm,
            rotary=projected.rotary,
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
