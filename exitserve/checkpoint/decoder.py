"""The layers, norm and head of a Hugging Face decoder, for every supported family.

Shapes: B rows, T tokens, D hidden, V vocabulary. `hidden[l]` is the residual stream after l
layers, *un-normed*. Of Hugging Face's `hidden_states` the last is normed and the others are not;
hooks on the layers give un-normed states at every depth.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from exitserve.errors import ExitServeError, shown

FAMILIES = (
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)
"""Hugging Face model types that can be trained and traced."""


@dataclass(frozen=True)
class DecoderParts:
    """The layers, final norm and LM head of a causal LM."""

    layers: nn.ModuleList
    norm: nn.Module
    head: nn.Module
    soft_cap: float | None = None
    """Bound of the logits by tanh, where the architecture has one (Gemma 2)."""

    @property
    def num_layers(self) -> int:
        """L, the full depth."""
        return len(self.layers)

    def classify(self, hidden: Tensor) -> Tensor:
        """Final norm, then LM head: un-normed `hidden` [..., D] to raw logits [..., V]."""
        return self.classify_normed(self.norm(hidden))

    def classify_normed(self, normed: Tensor) -> Tensor:
        """The LM head: normed states [..., D] to raw logits [..., V]."""
        logits: Tensor = self.head(normed)
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits


def check_family(family: Any) -> str:
    """Returns the `model_type` of a config; raises `ExitServeError` unless it is of `FAMILIES`."""
    if family not in FAMILIES:
        raise ExitServeError(
            f"model type {shown(family)} is not supported; supported: {', '.join(FAMILIES)}."
        )
    return str(family)


def decoder_parts(model: Any) -> DecoderParts:
    """The parts of a causal LM of a supported family (`FAMILIES`).

    Raises:
        ExitServeError: the model is of another family.
    """
    family = check_family(model.config.model_type)
    if family == "gpt2":
        return DecoderParts(model.transformer.h, model.transformer.ln_f, model.lm_head)
    if family == "gpt_neox":
        body = model.gpt_neox
        return DecoderParts(body.layers, body.final_layer_norm, model.get_output_embeddings())
    soft_cap = getattr(model.config, "final_logit_softcapping", None)
    return DecoderParts(model.model.layers, model.model.norm, model.lm_head, soft_cap)


@contextmanager
def replayed(layers: nn.ModuleList, depth: int, output: Any) -> Iterator[None]:
    """While active, the first `depth` layers do not run; they return `output`, the last one's.

    Hooks on them are called all the same.
    """
    replaced = list(layers)[:depth]
    for layer in replaced:
        layer.forward = lambda *_args, **_kwargs: output
    try:
        yield
    finally:
        for layer in replaced:
            del layer.forward  # the class's own is back


def hidden_of(output: Any) -> Tensor:
    """A decoder layer's output is its hidden state, alone or first in a tuple."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


@contextmanager
def capture_outputs(
    layers: nn.ModuleList, depths: Iterable[int], part: Callable[[Any], Any] = lambda output: output
) -> Iterator[dict[int, Any]]:
    """Collects what the layers at some depths give, or a `part` of it, by depth.

    The dictionary fills during a forward pass made inside the context.
    """
    captured: dict[int, Any] = {}

    def hook_for(depth: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            captured[depth] = part(output)

        return hook

    handles = [layers[depth - 1].register_forward_hook(hook_for(depth)) for depth in depths]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def capture_hidden(
    layers: nn.ModuleList, depths: Iterable[int]
) -> AbstractContextManager[dict[int, Tensor]]:
    """Collects `hidden[l]` [B, T, D] (un-normed, with gradient), as `capture_outputs` does."""
    return capture_outputs(layers, depths, hidden_of)
