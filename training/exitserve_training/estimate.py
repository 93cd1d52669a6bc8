"""What a run will take, before it reads data or weights: memory from shapes, time from a probe.

The parts of memory are counted: 4 bytes a weight and a gradient, 8 for AdamW's moments, or 2, 2 and
6 with `weights: bfloat16`. What layers keep for backward is a formula over their sizes, right
within a factor of two for Llama-like ones. Time is that of the products and of the optimizer's
memory traffic (`throughput`); whatever else a step does comes on top.

Shapes: D hidden, I intermediate, V vocabulary, T tokens of a sequence.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from exitserve.errors import ExitServeError
from exitserve.windows import load_tokenizer
from exitserve_training.adapters import with_adapters
from exitserve_training.arguments import training_arguments
from exitserve_training.losses.head_losses import chunk_size
from exitserve_training.models import build_config, build_model
from exitserve_training.objectives.aligned.options import KLToLastOptions
from exitserve_training.objectives.options import BuildContext
from exitserve_training.objectives.weighted_sum import Objectives
from exitserve_training.parts import ModelParts, model_parts
from exitserve_training.recipe import Recipe
from exitserve_training.throughput import (
    flops_per_token,
    head_width,
    measured_rates,
    teacher_parameters,
    teachers,
)
from exitserve_training.training_setup import TrainingSetup, training_setup

GIB = 2**30
_ADAMW_TRAFFIC = 28
"""Bytes a weight: reads of weight, gradient and two moments, writes of three of them."""


@dataclass(frozen=True)
class Estimate:
    """Of one process."""

    parameters: int
    trained: int
    bytes_of: dict[str, int]
    """What takes memory, to its bytes, as they are all there when backward begins."""
    tokens_per_step: int
    """Of all processes."""
    seconds_per_step: float
    flops_per_step: float
    """Of all processes."""
    flops_per_second: float
    """What the device of this process does of products, as measured."""
    steps: int | None
    """None where the length of the data decides."""
    max_minutes: float | None = None
    """The recipe's."""

    @property
    def total_bytes(self) -> int:
        """The peak."""
        return sum(self.bytes_of.values())

    def rows(self) -> list[tuple[str, str]]:
        """For people: what, and how much."""
        memory = [(what, f"{size / GIB:.2f} GiB") for what, size in self.bytes_of.items() if size]
        rows = [
            ("parameters", f"{self.parameters:,}, of which {self.trained:,} learn"),
            *memory,
            ("memory in all, about", f"{self.total_bytes / GIB:.2f} GiB"),
            ("tokens a step", f"{self.tokens_per_step:,}"),
            ("a step, at least", f"{self.seconds_per_step:.2f} s"),
            ("products a step", f"{self.flops_per_step / 1e12:,.2f} TFLOP"),
            ("this machine's products", f"{self.flops_per_second / 1e12:,.2f} TFLOP/s, measured"),
        ]
        if self.max_minutes is not None:
            rows.append(("ends by the clock after", f"{self.max_minutes:g} min"))
        elif self.steps is not None:
            hours = self.steps * self.seconds_per_step / 3600
            whole = f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.1f} min"
            rows.append((f"{self.steps:,} steps, at least", whole))
        return rows


def estimate(recipe: Recipe) -> Estimate:
    """Reads the recipe and the model's config; loads no weights and writes nothing.

    Raises:
        ExitServeError: the recipe cannot be done, or trains no language model.
    """
    if recipe.data.is_classification:
        raise ExitServeError(
            f"--estimate is for language models, and data.format={recipe.data.format} trains a "
            f"classifier."
        )
    setup = training_setup(recipe)
    config = _sized(recipe, setup)
    with torch.device("meta"):
        model = build_model(config, setup.task)
        parts = model_parts(model)
        own = _objective_parameters(recipe, setup, model, parts)
    arguments = training_arguments(recipe)
    parameters = model.num_parameters()
    # PEFT keeps adapters in float32.
    small = recipe.weights == "bfloat16" and recipe.lora is None
    rows, length = arguments.per_device_train_batch_size, recipe.data.sequence_length
    micro_tokens = rows * length
    frozen = sum(teacher_parameters(path) for path in teachers(recipe) if path is not None)
    accumulated = micro_tokens * arguments.gradient_accumulation_steps
    flops = accumulated * flops_per_token(recipe, parts, config)
    kept = micro_tokens * _kept_per_token(config, parts, bool(arguments.gradient_checkpointing))
    # With adapters these alone learn.
    learning = model if recipe.lora is None else with_adapters(model, recipe.lora)
    trained = own + sum(p.numel() for p in learning.parameters() if p.requires_grad)
    rates = measured_rates(arguments.device, torch.bfloat16 if recipe.bf16 else torch.float32)
    return Estimate(
        parameters=parameters,
        trained=trained,
        bytes_of={
            "weights": (2 if recipe.weights == "bfloat16" else 4) * parameters + 4 * own,
            "a frozen teacher's": (2 if recipe.bf16 else 4) * frozen,
            "gradients": (2 if small else 4) * trained,
            "optimizer states": (4 if recipe.optimizer == "muon" else 6 if small else 8) * trained,
            "states kept for backward": kept * (2 if recipe.bf16 else 4),
            "logits of a chunk": 3
            * 4
            * min(micro_tokens, chunk_size(arguments.device, config.vocab_size))
            * config.vocab_size,
        },
        tokens_per_step=accumulated * arguments.world_size,
        seconds_per_step=flops / rates.flops + trained * _ADAMW_TRAFFIC / rates.bandwidth,
        flops_per_step=flops * arguments.world_size,
        flops_per_second=rates.flops,
        max_minutes=recipe.max_minutes,
        steps=arguments.max_steps if arguments.max_steps > 0 else None,
    )


def _sized(recipe: Recipe, setup: TrainingSetup) -> PreTrainedConfig:
    """The config with the vocabulary that the tokenizer will give it."""
    if recipe.config is None or recipe.config.get("vocab_size") is not None:
        return setup.config
    assert recipe.tokenizer is not None
    trained = recipe.tokenizer.train_bpe
    path = str(recipe.tokenizer.path)
    size = len(load_tokenizer(path)) if trained is None else trained.vocab_size
    return build_config({**recipe.config, "vocab_size": size})


def _objective_parameters(
    recipe: Recipe, setup: TrainingSetup, model: PreTrainedModel, parts: ModelParts
) -> int:
    """How many the objectives have of their own: heads and projectors."""
    config: Any = model.config
    context = BuildContext(
        exit_layers=setup.exits.exit_layers,
        num_layers=parts.num_layers,
        hidden_size=config.hidden_size,
        head=parts.head,
        seed=recipe.seed,
    )
    # A teacher would be loaded, and is counted by itself.
    chosen = [o for o in recipe.objectives if not isinstance(o, KLToLastOptions)]
    return sum(p.numel() for p in Objectives(chosen, context).parameters())


def _kept_per_token(config: Any, parts: ModelParts, checkpointed: bool) -> int:
    """Numbers that backward needs of each token: per layer 6 D, the heads' twice, and 4 I."""
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    keys = int(getattr(config, "num_key_value_heads", None) or heads)
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    if hasattr(config, "num_experts_per_tok"):
        inner = config.num_experts_per_tok * int(getattr(config, "moe_intermediate_size", inner))
    by_layer = 6 * hidden + 2 * head_width(config) * (2 * heads + 2 * keys) + 4 * inner
    # Checkpointed: what enters each layer, and one layer whole while it runs again.
    return parts.num_layers * hidden + by_layer if checkpointed else parts.num_layers * by_layer
