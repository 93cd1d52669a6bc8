"""The architectures: `MultiExitMixin` fits most, and the other classes say what differs.

docs/adding-an-architecture.md walks through one.
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


class MultiExitLlamaForCausalLM(MultiExitMixin, LlamaForCausalLM):
    """Llama with exits."""


class MultiExitMistralForCausalLM(MultiExitMixin, MistralForCausalLM):
    """Mistral with exits."""


class MultiExitQwen2ForCausalLM(MultiExitMixin, Qwen2ForCausalLM):
    """Qwen 2 and 2.5 with exits: biases on keys and values."""


class MultiExitQwen3ForCausalLM(MultiExitMixin, Qwen3ForCausalLM):
    """Qwen 3 with exits: a norm on each key head."""


class MultiExitPhi3ForCausalLM(MultiExitMixin, Phi3ForCausalLM):
    """Phi-3 with exits."""


class MultiExitGemma2ForCausalLM(MultiExitMixin, Gemma2ForCausalLM):
    """Gemma 2 with exits: sandwich norms, soft caps, windows in every other layer."""

    def output_head(self) -> nn.Module:
        """The embeddings: Gemma 2 always ties them, and vLLM keeps no other head."""
        return self.model.embed_tokens  # type: ignore[no-any-return]


class MultiExitGemma3ForCausalLM(MultiExitMixin, Gemma3ForCausalLM):  # type: ignore[misc]  # its extra keyword arguments
    """Gemma 3 (text) with exits: also key norms, and two rotary embeddings."""


class MultiExitMixtralForCausalLM(MultiExitMixin, MixtralForCausalLM):
    """Mixtral with exits: a mixture of experts."""


class MultiExitQwen3MoeForCausalLM(MultiExitMixin, Qwen3MoeForCausalLM):
    """Qwen 3 mixture of experts with exits."""


class MultiExitGPT2LMHeadModel(MultiExitMixin, GPT2LMHeadModel):
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
