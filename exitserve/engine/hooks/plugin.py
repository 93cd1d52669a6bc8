"""vLLM's plugin entry point, and which architectures exits are available for.

Light to import: the command line reads the table before vLLM is loaded.
"""

import logging
from functools import cache
from importlib.metadata import entry_points

_FAMILIES = "exitserve.engine.architectures.decoders"

ARCHITECTURES = {
    "GPT2LMHeadModel": f"{_FAMILIES}:MultiExitGPT2LMHeadModel",
    "Gemma2ForCausalLM": f"{_FAMILIES}:MultiExitGemma2ForCausalLM",
    "Gemma3ForCausalLM": f"{_FAMILIES}:MultiExitGemma3ForCausalLM",
    "LlamaForCausalLM": f"{_FAMILIES}:MultiExitLlamaForCausalLM",
    "MistralForCausalLM": f"{_FAMILIES}:MultiExitMistralForCausalLM",
    "MixtralForCausalLM": f"{_FAMILIES}:MultiExitMixtralForCausalLM",
    "Olmo2ForCausalLM": "exitserve.engine.architectures.olmo2:MultiExitOlmo2ForCausalLM",
    "Phi3ForCausalLM": f"{_FAMILIES}:MultiExitPhi3ForCausalLM",
    "Qwen2ForCausalLM": f"{_FAMILIES}:MultiExitQwen2ForCausalLM",
    "Qwen3ForCausalLM": f"{_FAMILIES}:MultiExitQwen3ForCausalLM",
    "Qwen3MoeForCausalLM": f"{_FAMILIES}:MultiExitQwen3MoeForCausalLM",
}
"""Architecture of a checkpoint to the class, as "module:Class", that serves it with exits."""

ENTRY_POINTS = "exitserve.architectures"
"""Entry point group in which other packages name theirs, in the same form."""


@cache
def architectures() -> dict[str, str]:
    """Our architectures and those of installed packages; a package's own goes before ours."""
    found = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    return ARCHITECTURES | found


def class_name(location: str) -> str:
    """The name under which vLLM knows the class at "module:Class"."""
    return location.rpartition(":")[2]


def register() -> None:
    """Registers the model classes; vLLM calls this in each of its processes."""
    from exitserve.engine.compat.processes import make_room

    make_room()
    for location in architectures().values():
        register_model(location)
    _log_as_vllm_does()


def register_model(location: str) -> None:
    """Makes the class at "module:Class" known to vLLM, which imports it when it is served."""
    from vllm import ModelRegistry

    if class_name(location) not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(class_name(location), location)


def _log_as_vllm_does() -> None:
    """Shows what we log, such as which kernels run, where and how vLLM shows its own."""
    ours, its = logging.getLogger("exitserve"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(its.handlers)
        ours.setLevel(its.level)
