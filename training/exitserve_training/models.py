"""The model to train: from scratch by a config, or loaded from a directory or hub id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from exitserve.checkpoint import read_config
from exitserve.decoder import FAMILIES
from exitserve.errors import ExitServeError, nearest


def check_model(path: str) -> PreTrainedConfig:
    """Reads the config of a directory or hub id and makes sure it is a supported causal LM.

    Raises:
        ExitServeError: missing, no causal LM, or of a family that is not supported.
    """
    if Path(path).exists() or path.startswith((".", "/", "~")):
        read_config(path)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ExitServeError(
            f"no model at '{path}': no checkpoint directory, and no hub id that can be reached."
        ) from error
    supported = f"supported families: {', '.join(FAMILIES)}"
    if config.model_type not in FAMILIES:
        raise ExitServeError(f"'{path}' is of model type {config.model_type!r}; {supported}.")
    for architecture in config.architectures or []:
        if not architecture.endswith(("ForCausalLM", "LMHeadModel")):
            raise ExitServeError(
                f"'{path}' is a {architecture}, not a causal language model; {supported}."
            )
    return config


def load_model(path: str) -> PreTrainedModel:
    """Loads a causal LM in float32 (`bf16: true` computes in bfloat16 all the same)."""
    check_model(path)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model


def build_config(recipe: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Turns the recipe's `config` into a Hugging Face config that fits the tokenizer.

    Raises:
        ExitServeError: unknown architecture or size key.
    """
    sizes = dict(recipe)
    family = str(sizes.pop("architecture"))
    if family not in FAMILIES:
        raise ExitServeError(
            f"config.architecture {family!r} is not supported; allowed: {', '.join(FAMILIES)}."
            f"{nearest(family, FAMILIES)}"
        )
    default = AutoConfig.for_model(family)
    known = {*default.to_dict(), *default.attribute_map}
    for key in sizes:
        if key not in known:
            raise ExitServeError(
                f"recipe key 'config.{key}' is unknown to {family}.{nearest(key, sorted(known))}"
            )
    sizes.setdefault("vocab_size", len(tokenizer))
    special = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    config: PreTrainedConfig = AutoConfig.for_model(family, **{**special, **sizes})
    return config


def build_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A freshly initialised float32 model; the caller seeds the generator."""
    auto: Any = AutoModelForCausalLM  # untyped in transformers
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32)
    return model


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
