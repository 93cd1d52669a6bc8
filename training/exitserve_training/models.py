"""The model to train: from scratch by a config, or loaded from a directory or hub id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from exitserve.checkpoint import read_config
from exitserve.errors import ExitServeError, nearest
from exitserve_training.parts import ENCODERS, TRAINABLE

_ENDINGS = {False: ("ForCausalLM", "LMHeadModel"), True: ("ForMaskedLM", "ForPreTraining")}
"""How architectures are called that have an LM head; by whether they are encoders."""


def check_model(path: str) -> PreTrainedConfig:
    """Reads the config of a directory or hub id and makes sure it is a supported language model.

    Raises:
        ExitServeError: missing, no language model, or of a family that is not supported.
    """
    if Path(path).exists() or path.startswith((".", "/", "~")):
        read_config(path)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ExitServeError(
            f"no model at '{path}': no checkpoint directory, and no hub id that can be reached."
        ) from error
    supported = f"supported families: {', '.join(TRAINABLE)}"
    if config.model_type not in TRAINABLE:
        raise ExitServeError(f"'{path}' is of model type {config.model_type!r}; {supported}.")
    for architecture in config.architectures or []:
        if not architecture.endswith(_ENDINGS[config.model_type in ENCODERS]):
            kind = "masked" if config.model_type in ENCODERS else "causal"
            raise ExitServeError(
                f"'{path}' is a {architecture}, not a {kind} language model; {supported}."
            )
    return config


def load_model(path: str) -> PreTrainedModel:
    """Loads a language model in float32 (`bf16: true` computes in bfloat16 all the same)."""
    config = check_model(path)
    try:
        model: PreTrainedModel = _auto(config).from_pretrained(path, dtype=torch.float32)
    except OSError as error:
        reason = " ".join(str(error).split())[:200]
        raise ExitServeError(f"the weights of '{path}' could not be loaded: {reason}") from error
    return model


def start_head_from_embeddings(model: PreTrainedModel) -> None:
    """Copies the input embeddings into the LM head: how a headless model gets one.

    Headless paper, section 4.2. Where head and embeddings are one tensor there is nothing to do.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding: Any = model.get_input_embeddings()
    if head.weight is not embedding.weight:
        with torch.no_grad():
            head.weight.copy_(embedding.weight)


def build_config(
    recipe: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None = None
) -> PreTrainedConfig:
    """Turns the recipe's `config` into a Hugging Face config that fits the tokenizer.

    Without a tokenizer only its depth and sizes are to be trusted.

    Raises:
        ExitServeError: unknown architecture or size key.
    """
    # A key that a recipe sets to null has the family's default again.
    sizes = {key: value for key, value in recipe.items() if value is not None}
    family = str(sizes.pop("architecture"))
    if family not in TRAINABLE:
        raise ExitServeError(
            f"config.architecture {family!r} is not supported; allowed: {', '.join(TRAINABLE)}."
            f"{nearest(family, TRAINABLE)}"
        )
    default = AutoConfig.for_model(family)
    known = {*default.to_dict(), *default.attribute_map}
    for key in sizes:
        if key not in known:
            raise ExitServeError(
                f"recipe key 'config.{key}' is unknown to {family}.{nearest(key, sorted(known))}"
            )
    special: dict[str, Any] = {}
    if tokenizer is not None:
        sizes.setdefault("vocab_size", len(tokenizer))
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        special = {name: getattr(tokenizer, name) for name in names}
    try:
        config: PreTrainedConfig = AutoConfig.for_model(family, **{**special, **sizes})
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ExitServeError(f"recipe key 'config': {reason}") from error
    return config


def build_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A freshly initialised float32 model; the caller seeds the generator."""
    model: PreTrainedModel = _auto(config).from_config(config, dtype=torch.float32)
    return model


def _auto(config: PreTrainedConfig) -> Any:
    """The auto class, untyped in transformers."""
    return AutoModelForMaskedLM if config.model_type in ENCODERS else AutoModelForCausalLM


def check_fits(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
    """Raises `ExitServeError` unless sequences of this tokenizer and length fit the model."""
    if len(tokenizer) > config.vocab_size:
        raise ExitServeError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocabulary only "
            f"{config.vocab_size}; use the model's own tokenizer or raise config.vocab_size."
        )
    if length > config.max_position_embeddings:
        raise ExitServeError(
            f"data.sequence_length={length} is longer than the model's context of "
            f"{config.max_position_embeddings} tokens; lower it."
        )
