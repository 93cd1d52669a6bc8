"""vLLM's plugin entry point, and which architectures exits are available for.

Light to import: the command line reads `ARCHITECTURES` before vLLM is loaded.
"""

from __future__ import annotations

ARCHITECTURES = {
    "LlamaForCausalLM": "MultiExitLlamaForCausalLM",
    "MistralForCausalLM": "MultiExitMistralForCausalLM",
}
"""Checkpoint architecture to the class that serves it with exits."""


def register() -> None:
    """Registers our model classes; vLLM calls this in each of its processes."""
    from vllm import ModelRegistry

    for name in ARCHITECTURES.values():
        if name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, f"exitserve.engine.families:{name}")
