"""K/V propagation in PyTorch: the reference in float32 (or float64), and the CPU form.

Shapes: N rows, D hidden, S layers, H kv heads, P head size, R rotated part of it.
"""

from typing import Any

import torch
from torch import Tensor


def normalised(states: Tensor, epsilon: float, *, centred: bool = False) -> Tensor:
    """States [N, D] scaled to unit root mean square, without gain: the input of all layers.

    The gain of each layer's input norm is folded into its K/V weights, so that one normalised
    state serves all. `centred` subtracts the mean first (layer norm). In float32, rounded once.
    """
    wide = _wide(states)
    if centred:
        wide = wide - wide.mean(dim=-1, keepdim=True)
    scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return scaled.to(states.dtype)


def keys_and_values(
    projected: Tensor, positions: Tensor, heads: int, key_norm: Any | None, rotary: Any | None
) -> tuple[Tensor, Tensor]:
    """The caches' new content: keys and values [N, S, H, P], keys in float32 (or float64).

    All layers at once, because on a CPU a call costs more than its arithmetic.
    """
    size = projected.shape[3] // heads
    keys, values = projected.reshape(*projected.shape[:3], heads, size).unbind(dim=2)
    if key_norm is not None:
        keys = _normed(_wide(keys), key_norm.gains, key_norm.epsilon)
    if rotary is not None:
        keys = rotated(_wide(keys), rotary.angles(positions), rotary.interleaved)
    return keys, values


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _normed(keys: Tensor, gains: Tensor, epsilon: float) -> Tensor:
    """Key norm of [N, S, H, P], over each head or over all of a token's heads together."""
    grouped = keys if gains.shape[1] == keys.shape[-1] else keys.flatten(2)[:, :, None]
    scale = torch.rsqrt(grouped.square().mean(dim=-1, keepdim=True) + epsilon)
    return (grouped * scale * gains[:, None].to(keys.dtype)).view(keys.shape)


def rotated(keys: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rotates the first R of each head of [N, S, H, P] by angles [N, S or 1, R]: cos, then sin."""
    width = angles.shape[-1]
    cos, sin = angles[:, :, None].to(keys.dtype).chunk(2, dim=-1)
    turned = keys[..., :width]
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    one = torch.addcmul(first * cos, second, sin, value=-1)
    other = torch.addcmul(second * cos, first, sin)
    if interleaved:
        one, other = torch.stack([one, other], dim=-1).flatten(-2), keys[..., :0]
    return torch.cat([one, other, keys[..., width:]], dim=-1)


def write(keys: Tensor, values: Tensor, slots: Tensor, caches: Any) -> None:
    """Writes keys and values [N, S, H, P] into paged `Caches`; slots are [N] or [S, N]."""
    block_size = caches.keys[0].shape[1]
    for layer in range(caches.layers):
        of_layer = slots if slots.dim() == 1 else slots[layer]
        written = of_layer >= 0
        block, place = of_layer[written] // block_size, of_layer[written] % block_size
        for cache, new, scales in (
            (caches.keys[layer], keys[:, layer], caches.key_scales),
            (caches.values[layer], values[:, layer], caches.value_scales),
        ):
            wide = _wide(new[written])
            if scales is not None:
                wide = wide / scales[layer, :, None]
            cache[block, place] = narrowed(wide, cache.dtype)


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts float32 to a cache's type; 8-bit types are clamped to their range."""
    if dtype.itemsize == 1:
        greatest = torch.finfo(dtype).max
        x = x.clamp(-greatest, greatest)
    return x.to(dtype)
