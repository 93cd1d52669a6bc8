"""How a decoder layer makes keys and values from the residual stream, for every architecture.

    x_hat = normalised(stream)          the input norm without its gain; the same for all layers
    k, v  = W x_hat + b                 gain and shift of the norm folded into W and b
    k     = key_norm(k), then rotary    where the architecture has them

Shapes: N tokens, D hidden, H kv heads, P head size, R rotated part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.layernorm import GemmaRMSNorm


@dataclass(frozen=True)
class Norm:
    """A root-mean-square norm, or a layer norm (`centred`), taken apart."""

    gain: Tensor
    shift: Tensor | None
    epsilon: float
    centred: bool

    @classmethod
    def of(cls, module: Any) -> Norm:
        """Reads vLLM's RMSNorm, GemmaRMSNorm or LayerNorm, or Hugging Face's of the same form."""
        shift = getattr(module, "bias", None)
        if hasattr(module, "variance_epsilon"):
            gain = module.weight.float()
            # Gemma's norms multiply by one plus their weight.
            gain = gain + 1.0 if isinstance(module, GemmaRMSNorm) else gain
            return cls(gain, shift, module.variance_epsilon, centred=False)
        return cls(module.weight.float(), shift, module.eps, centred=True)


@dataclass(frozen=True)
class LayerKV:
    """Keys and values of one layer."""

    attention: Any
    """vLLM's `Attention`: sizes, cache, name."""
    sources: tuple[tuple[Any, slice], ...]
    """vLLM linear layers, each with the part of its output that makes keys, then values."""
    input_norm: Norm | None
    """None where the stream is projected as it is (post-norm architectures)."""
    key_norm: Norm | None = None
    """Gain [P], over each head; or [H * P], over all heads of a token together."""
    rotary: Any = None
    """vLLM's rotary embedding; None for learned positions."""

    def folded(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """K/V weights [2 * H * P, D] with the input norm folded in, and their bias [2 * H * P].

        Args:
            like: any states [N, D], for their width, type and device.
        """
        parts = [_weight_and_bias(linear, part, like) for linear, part in self.sources]
        weight = torch.cat([weight for weight, _ in parts])
        bias = torch.cat([bias for _, bias in parts])
        if self.input_norm is not None:
            if self.input_norm.shift is not None:
                bias = bias + weight @ self.input_norm.shift.float()
            weight = weight * self.input_norm.gain
        return weight.to(like.dtype), bias.to(like.dtype)


def _weight_and_bias(linear: Any, part: slice, like: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 weight [K, D] and bias [K] of a part of a vLLM linear layer's outputs.

    The weight is read by applying the layer to the identity matrix: after loading, vLLM repacks
    linear weights and empties the originals, and quantised layers keep none to read.
    """
    identity = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
    # Without the bias: added first and taken off again, a large one would round the weight away.
    weight = linear.quant_method.apply(linear, identity, bias=None)[:, part].T.float()
    bias = weight.new_zeros(weight.shape[0])
    if getattr(linear, "bias", None) is not None:
        bias = linear.bias[part].float()
    return weight, bias


def packed_qkv(attention: Any, projection: Any) -> tuple[tuple[Any, slice], ...]:
    """The source of keys and values where one linear layer makes queries, keys and values."""
    return ((projection, slice(attention.num_heads * attention.head_size, None)),)


def rotation_table(layer: LayerKV, longest: int, like: Tensor) -> Tensor | None:
    """Cosines, then sines [longest, R] of a layer's rotary embedding, None if it has none.

    They are read by rotating unit keys, so that every embedding (scaled, of several parts, of
    Hugging Face) is read in the same way: (1, 0) turns into (cos, sin).

    Args:
        layer: the layer.
        longest: positions are below this.
        like: any states, for their type and device.
    """
    rotary, size = layer.rotary, layer.attention.head_size
    if rotary is None:
        return None
    width = getattr(rotary, "rotary_dim", size)
    positions = torch.arange(longest, device=like.device)
    unit = torch.zeros(longest, size, dtype=like.dtype, device=like.device)
    halves = getattr(rotary, "is_neox_style", True)
    first = slice(0, width // 2) if halves else slice(0, width, 2)
    second = slice(width // 2, width) if halves else slice(1, width, 2)
    unit[:, first] = 1.0
    # Some rotary embeddings insist on a query; zeros will do.
    turned = rotary(positions, torch.zeros_like(unit), unit)[1]
    return torch.cat([turned[:, first], turned[:, second]], dim=-1).contiguous()
