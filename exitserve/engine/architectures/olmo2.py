"""OLMo 2 with exits: post-norm layers, which vLLM runs as Hugging Face modules.

vLLM has no class of its own for OLMo 2; its Transformers backend builds Hugging Face's model with
vLLM's attention and linear layers. Such layers work on [1, T, D] and take the rotary embedding's
cosines and sines as an argument.
"""

from typing import Any

from torch import Tensor, nn
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb
from vllm.model_executor.models.transformers import TransformersForCausalLM

from exitserve.engine.layers.key_values import LayerKV, Norm, packed_qkv
from exitserve.engine.layers.segments import Stream
from exitserve.engine.model import MultiExitMixin


class MultiExitOlmo2ForCausalLM(MultiExitMixin, TransformersForCausalLM):  # type: ignore[misc]  # keywords
    """OLMo 2 with exits."""

    def __init__(self, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        if vllm_config.parallel_config.tensor_parallel_size > 1:
            raise ValueError(
                "exitserve does not support tensor parallelism for OLMo 2, whose key norm spans "
                "all heads; use --tensor-parallel-size 1."
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
        self._rotary = _Rotary(self.model.rotary_emb)

    def run_layer(self, layer: Any, positions: Tensor, stream: Stream) -> Stream:  # type: ignore[override]
        """One Hugging Face layer; it adds its own residuals."""
        hidden, places = stream[0][None], positions[None]
        angles = self.model.rotary_emb(hidden, position_ids=places)
        out = layer(hidden, attention_mask=None, position_embeddings=angles, position_ids=places)
        return out[0], None

    def final_norm(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        """The final norm of [T, D]."""
        return self.model.norm(hidden)  # type: ignore[no-any-return]

    def layer_kv(self, layer: Any) -> LayerKV:
        """Keys and values straight from the stream: the norms come after attention."""
        attention = layer.self_attn
        if hasattr(attention, "qkv_proj"):
            sources = packed_qkv(attention.attn, attention.qkv_proj)
        else:
            sources = ((attention.k_proj, slice(None)), (attention.v_proj, slice(None)))
        return LayerKV(
            attention=attention.attn,
            sources=sources,
            input_norm=None,
            key_norm=Norm.of(attention.k_norm),
            rotary=self._rotary,
        )


class _Rotary:
    """Hugging Face's rotary embedding, called as vLLM's are."""

    def __init__(self, embedding: nn.Module) -> None:
        self._angles = embedding

    def __call__(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates `key` [N, heads * P]; `query` comes back as it is."""
        cosines, sines = self._angles(key, position_ids=positions[None])
        heads = key.view(1, key.shape[0], -1, cosines.shape[-1])
        _, rotated = apply_rotary_pos_emb(heads, heads, cosines, sines, unsqueeze_dim=2)
        return query, rotated.view(key.shape)
