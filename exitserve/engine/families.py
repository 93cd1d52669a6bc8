"""One small class per architecture: vLLM's own model with exits."""

from __future__ import annotations

from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM

from exitserve.engine.segments import MultiExitMixin


class MultiExitLlamaForCausalLM(MultiExitMixin, LlamaForCausalLM):
    """Llama with exits."""


class MultiExitMistralForCausalLM(MultiExitMixin, MistralForCausalLM):
    """Mistral with exits."""
