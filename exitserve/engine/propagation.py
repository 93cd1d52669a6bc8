"""K/V propagation: keys and values of all layers not run, from the frozen state, in one GEMM.

Layer l computes its keys from `norm_l(x) = g_l * x_hat`, where `x_hat` is the root-mean-square
normalised state and `g_l` the layer's input-norm gain. `x_hat` is the same for every layer, so
folding `g_l` into the columns of the layer's K/V weights leaves one product
`x_hat @ [W_k1 g_1; W_v1 g_1; W_k2 g_2; ...].T` for all layers above an exit.

Shapes: T tokens, D hidden, N skipped layers, H kv heads, P head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from exitserve.engine.compat import write_kv


class Propagation:
    """Fills the paged cache of the layers above an exit."""

    def __init__(self, layers: list[nn.Module], first: int) -> None:
        """Takes the K/V weights of `layers[first:]` (decoder layers, after loading)."""
        self.first = first
        self.attentions: list[Any] = [layer.self_attn for layer in layers[first:]]
        self.rotary = self.attentions[0].rotary_emb
        self.heads: int = self.attentions[0].num_kv_heads
        self.head_dim: int = self.attentions[0].head_dim
        norm: Any = layers[first].input_layernorm
        self.epsilon: float = norm.variance_epsilon
        folded = [_folded(layer) for layer in layers[first:]]
        self.weight = torch.cat([weight for weight, _ in folded])  # [N * 2 * H * P, D]
        biases = [bias for _, bias in folded if bias is not None]
        self.bias = torch.cat(biases) if biases else None

    def fill(self, state: Tensor, positions: Tensor, depth: int) -> None:
        """Writes K/V of every layer above `depth` from the frozen `state` [T, D]."""
        skipped = self.attentions[depth - self.first :]
        width = 2 * self.heads * self.head_dim
        start = (depth - self.first) * width
        x = state.float()
        x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.epsilon)
        bias = None if self.bias is None else self.bias[start:]
        kv = functional.linear(x.to(state.dtype), self.weight[start:], bias)
        kv = kv.view(-1, len(skipped), 2, self.heads, self.head_dim)
        # Every layer rotates by the same angles: all their keys pass as heads of one tensor.
        keys = kv[:, :, 0].reshape(kv.shape[0], -1).contiguous()
        keys, _ = self.rotary(positions, keys, None)
        keys = keys.view(-1, len(skipped), self.heads, self.head_dim)
        for index, attention in enumerate(skipped):
            write_kv(
                keys[:, index].contiguous(), kv[:, index, 1].contiguous(), attention.attn.layer_name
            )


def _folded(layer: Any) -> tuple[Tensor, Tensor | None]:
    """K/V weights [2 * H * P, D] with the input norm's gain folded in, and their bias.

    The weights are read through the projection itself (of the identity matrix), because vLLM
    repacks linear weights after loading and empties the originals.
    """
    projection = layer.self_attn.qkv_proj
    gain: Tensor = layer.input_layernorm.weight
    q_size: int = layer.self_attn.q_size
    identity = torch.eye(gain.shape[0], dtype=gain.dtype, device=gain.device)
    output, _ = projection(identity)
    zero, _ = projection(torch.zeros_like(identity[:1]))
    bias = zero[0, q_size:] if zero.any() else None
    weight = (output - zero)[:, q_size:].T
    return (weight * gain).contiguous(), bias
