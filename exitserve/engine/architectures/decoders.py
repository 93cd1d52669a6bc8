"""What differs between architectures: where a decoder keeps its parts and makes keys and values.

`Family` fits every vLLM model whose layers take (positions, hidden, residual), which is most of
them; the few classes below it say what differs. docs/adding-an-architecture.md walks through one.
"""

from typing import Any

from torch import Tensor, nn
from vllm.model_executor.models.gemma2 import Gemma2ForCausalLM
from vllm.model_executor.models.gemma3 import Gemma3ForCausalLM
from vllm.model_executor.models.gpt2 import GPT2LMHeadModel
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.mixtral import MixtralForCausalLM
from vllm.model_executor.models.phi3 import Phi3ForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from exitserve.engine.layers.key_values import LayerKV, Norm, packed_qkv
from exitserve.engine.layers.segments import Stream
from exitserve.engine.model import MultiExitMixin


class Family(MultiExitMixin):
    """A Llama-like decoder: pre-norm layers that carry the stream as a pair.

    Shapes: T tokens, D hidden.
    """

    model: Any

    def decoder_layers(self) -> list[nn.Module]:
        """The decoder layers, first to last."""
        return list(self.model.layers)

    def embed(self, input_ids: Tensor | None, positions: Tensor, embeds: Tensor | None) -> Tensor:
        """The first layer's input [T, D], from token ids [T] or ready embeddings [T, D]."""
        own: Any = self
        return embeds if embeds is not None else own.embed_input_ids(input_ids)

    @staticmethod
    def run_layer(layer: Any, positions: Tensor, stream: Stream) -> Stream:
        """Runs one layer; compiled, so keep to what torch.compile can trace."""
        hidden, residual = stream
        return layer(positions, hidden, residual)  # type: ignore[no-any-return]

    def final_norm(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        """The shared final norm of the stream [T, D]."""
        if residual is None:
            return self.model.norm(hidden)  # type: ignore[no-any-return]
        return self.model.norm(hidden, residual)[0]  # type: ignore[no-any-return]

    def output_head(self) -> nn.Module:
        """The LM head, vLLM's `ParallelLMHead`."""
        return self.lm_head  # type: ignore[no-any-return, attr-defined]  # of the vLLM class

    def layer_kv(self, layer: Any) -> LayerKV:
        """How `layer` makes its keys and values."""
        attention = layer.self_attn
        key_norm = getattr(attention, "k_norm", None)
        return LayerKV(
            attention=attention.attn,
            sources=packed_qkv(attention.attn, attention.qkv_proj),
            input_norm=Norm.of(layer.input_layernorm),
            key_norm=None if key_norm is None else Norm.of(key_norm),
            rotary=attention.rotary_emb,
        )


class MultiExitLlamaForCausalLM(Family, LlamaForCausalLM):
    """Llama with exits."""


class MultiExitMistralForCausalLM(Family, MistralForCausalLM):
    """Mistral with exits."""


class MultiExitQwen2ForCausalLM(Family, Qwen2ForCausalLM):
    """Qwen 2 and 2.5 with exits: biases on keys and values."""


class MultiExitQwen3ForCausalLM(Family, Qwen3ForCausalLM):
    """Qwen 3 with exits: a norm on each key head."""


class MultiExitPhi3ForCausalLM(Family, Phi3ForCausalLM):
    """Phi-3 with exits."""


class MultiExitGemma2ForCausalLM(Family, Gemma2ForCausalLM):
    """Gemma 2 with exits: sandwich norms, soft caps, windows in every other layer."""

    def output_head(self) -> nn.Module:
        """The embeddings: Gemma 2 always ties them, and vLLM keeps no other head."""
        return self.model.embed_tokens  # type: ignore[no-any-return]


class MultiExitGemma3ForCausalLM(Family, Gemma3ForCausalLM):  # type: ignore[misc]  # its extra keyword arguments
    """Gemma 3 (text) with exits: also key norms, and two rotary embeddings."""


class MultiExitMixtralForCausalLM(Family, MixtralForCausalLM):
    """Mixtral with exits: a mixture of experts."""


class MultiExitQwen3MoeForCausalLM(Family, Qwen3MoeForCausalLM):
    """Qwen 3 mixture of experts with exits."""


class MultiExitGPT2LMHeadModel(Family, GPT2LMHeadModel):
    """GPT-2 with exits: learned positions, layer norms with bias, one stream tensor."""

    transformer: Any

    def decoder_layers(self) -> list[nn.Module]:
        """The blocks."""
        return list(self.transformer.h)

    def embed(self, input_ids: Tensor | None, positions: Tensor, embeds: Tensor | None) -> Tensor:
        """Token plus position embeddings [T, D]."""
        tokens = super().embed(input_ids, positions, embeds)
        return tokens + self.transformer.wpe(positions)  # type: ignore[no-any-return]

    @staticmethod
    def run_layer(layer: Any, positions: Tensor, stream: Stream) -> Stream:
        """Blocks know no positions and add their own residuals."""
        return layer(stream[0]), None

    def final_norm(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        """The final layer norm of [T, D]."""
        return self.transformer.ln_f(hidden)  # type: ignore[no-any-return]

    def layer_kv(self, layer: Any) -> LayerKV:
        """How a block makes its keys and values."""
        attention = layer.attn
        return LayerKV(
            attention=attention.attn,
            sources=packed_qkv(attention.attn, attention.c_attn),
            input_norm=Norm.of(layer.ln_1),
        )
