"""K/V propagation in PyTorch: the truth in float32 (or float64), and the form without a GPU.

Shapes: N rows, D hidden, S layers, H kv heads, P head size, R rotated part of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def normalised(states: Tensor, epsilon: float, *, centred: bool = False) -> Tensor:
    """States [N, D] at unit root mean square, without gain: what every layer's weights take.

    The gain of each layer's input norm is folded into its K/V weights, so that one normalised
    state serves all. `centred` subtracts the mean first (layer norm). In float32, rounded once.
    """
    wide = states if states.dtype == torch.float64 else states.float()
    if centred:
        wide = wide - wide.mean(dim=-1, keepdim=True)
    scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return scaled.to(states.dtype)


def fill(
    projected: Tensor,
    positions: Tensor,
    slots: Tensor,
    caches: Any,
    key_norm: Any | None,
    rotary: Any | None,
) -> None:
    """See `propagate_kv.fill`."""
    _, block_size, heads, size = caches.keys[0].shape
    written = slots >= 0
    block = slots[written] // block_size
    place = slots[written] % block_size
    for layer in range(len(caches.keys)):
        keys, values = (_wide(projected[:, layer, kind]) for kind in (0, 1))
        keys = keys.view(-1, heads, size)
        if key_norm is not None:
            keys = _normed(keys, key_norm.gains[layer], key_norm.epsilon)
        if rotary is not None:
            keys = rotated(keys, rotary.tables[layer][positions], rotary.interleaved)
        values = values.view(-1, heads, size)
        for cache, new, scales in (
            (caches.keys[layer], keys, caches.key_scales),
            (caches.values[layer], values, caches.value_scales),
        ):
            if scales is not None:
                new = new / scales[layer]
            cache[block, place] = narrowed(new[written], cache.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _normed(keys: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """Key norm of [N, H, P], over each head or over all of a token's heads together."""
    grouped = keys if gain.shape[0] == keys.shape[-1] else keys.flatten(1)
    scale = torch.rsqrt(grouped.square().mean(dim=-1, keepdim=True) + epsilon)
    return (grouped * scale * gain.to(keys.dtype)).view(keys.shape)


def rotated(keys: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    """Rotates the first R of each head of [N, H, P] by angles whose [N, R] are cos, then sin."""
    width = table.shape[-1]
    cos, sin = table[:, None].to(keys.dtype).chunk(2, dim=-1)
    turned, rest = keys[..., :width], keys[..., width:]
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    one, other = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        turned = torch.stack([one, other], dim=-1).flatten(-2)
    else:
        turned = torch.cat([one, other], dim=-1)
    return torch.cat([turned, rest], dim=-1)


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 in a cache's type; what is too large for 8 bits becomes its greatest number."""
    if dtype.itemsize == 1:
        greatest = torch.finfo(dtype).max
        x = x.clamp(-greatest, greatest)
    return x.to(dtype)
