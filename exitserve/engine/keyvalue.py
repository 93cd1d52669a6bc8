"""How a decoder layer makes keys and values from the residual stream, for every architecture.

    x_hat = normalise(stream)           the input norm without its gain; the same for all layers
    k, v  = W x_hat + b                 gain and shift of the norm folded into W and b
    k     = key_norm(k), then rotary    where the architecture has them

Shapes: N tokens, D hidden, H kv heads, P head size.
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

    def normalise(self, x: Tensor) -> Tensor:
        """Scales the last dimension of `x` to unit size in float32, without gain and shift."""
        x = x.float()
        if self.centred:
            x = x - x.mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.epsilon)


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
