"""The share of the machine's products that training reaches (MFU), and what keeps it low.

Products are counted: 2 for each weight and token forward, 4 backward, those of attention, the head
once for each layer that is read, and a frozen teacher's forward pass. What the machine can do is
measured, by one large product in the dtype of the run.

Shapes: D hidden, L layers, T tokens of a sequence, V vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainingArguments

from exitserve_kernels.dispatch import chosen
from exitserve_training.models import build_model, model_config
from exitserve_training.objectives.aligned.options import AlignedOptions, KLToLastOptions
from exitserve_training.objectives.options import ObjectiveOptions
from exitserve_training.parts import ModelParts
from exitserve_training.recipe import Recipe

LOW_SHARE = 0.15
"""Of a GPU's products; below it a run has something to gain."""
LARGE_BATCH = 8192
"""Tokens of a micro-batch that fill a GPU."""
_PROBES = {"cpu": (512, 2**22)}
_LARGE_PROBE = (4096, 2**26)
"""Rows of the square product that is timed, and numbers of the addition, by device: a GPU that gets
little to do is timed at its latency."""


@dataclass(frozen=True)
class Rates:
    """What the machine does in a second, now."""

    flops: float
    """Operations of a product."""
    bandwidth: float
    """Bytes of an addition."""


def measured_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Times a product in `dtype` and an addition; takes a second at most."""
    rows, numbers = _PROBES.get(device.type, _LARGE_PROBE)
    # Not random numbers, whose generator the run draws from.
    a = torch.ones(rows, rows, device=device, dtype=dtype)
    long = torch.zeros(numbers, device=device)
    product = _seconds(lambda: a @ a, device)
    addition = _seconds(lambda: long.add_(1.0), device)
    return Rates(2.0 * rows**3 / product, 2.0 * 4.0 * len(long) / addition)


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """The least of many: what else the machine does only adds to it."""
    times, until = list[float](), time.perf_counter() + 0.4
    while len(times) < 6 or time.perf_counter() < until:
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return min(times)


def flops_per_token(recipe: Recipe, parts: ModelParts, config: Any) -> float:
    """Operations of a training step for each token of it."""
    linear: Any = parts.head.linear
    head = float(sum(p.numel() for p in linear.parameters()))
    body = sum(
        p.numel() * (_share_of_experts(config) if ".experts." in f".{name}." else 1.0)
        for name, p in parts.layers.named_parameters()
    )
    width = head_width(config)
    # Scores and values of the tokens before, half of the sequence on average.
    heads = int(config.num_attention_heads)
    attention = 2.0 * parts.num_layers * recipe.data.sequence_length * heads * width
    exits = recipe.exit_layers
    chosen_layers = list(range(1, parts.num_layers)) if exits == "all" else exits
    passes = 4.0 if recipe.training.get("gradient_checkpointing") else 3.0
    read = layers_read(recipe.objectives, chosen_layers, parts.num_layers)
    # The model's own last layer is read once more where it teaches.
    taught = sum(head if path is None else teacher_parameters(path) for path in teachers(recipe))
    return passes * (2.0 * body + attention) + 6.0 * read * head + 2.0 * taught


def head_width(config: Any) -> int:
    """Numbers of an attention head."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _share_of_experts(config: Any) -> float:
    """Of a mixture's experts, those that run for a token."""
    every = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    return float(getattr(config, "num_experts_per_tok", every) / every)


def layers_read(
    objectives: Sequence[ObjectiveOptions], exit_layers: Sequence[int], num_layers: int
) -> float:
    """How many layers the head reads in a step, on average: each once, whoever asks for it."""
    always: set[int] = set()
    sampled, plain = [], 0.0
    for options in objectives:
        if not options.trains_head:
            continue
        layers = {*options.layers_used(exit_layers, num_layers)}
        if isinstance(options, KLToLastOptions) and options.teacher is None:
            layers.discard(num_layers)
        if not isinstance(options, AlignedOptions):
            always |= layers
            continue
        plain = 0.5 if options.alternate else 0.0
        inner = layers - {num_layers}
        share = 1.0 if options.sample is None else min(options.sample / max(len(inner), 1), 1.0)
        sampled.append((inner, share))
        always.add(num_layers)
    drawn = sum(share * (1.0 - plain) * len(inner - always) for inner, share in sampled)
    return len(always) + drawn


def teachers(recipe: Recipe) -> list[str | None]:
    """Of each objective with a teacher its directory or hub id; None: the model's last layer."""
    options = [o for o in recipe.objectives if isinstance(o, KLToLastOptions)]
    return [one.teacher_path(recipe.model) for one in options]


def teacher_parameters(path: str) -> int:
    """Of a directory or hub id, by its config alone."""
    with torch.device("meta"):
        return build_model(model_config(path)).num_parameters()


class Throughput:
    """Turns tokens and seconds into the share of the machine's products that a run reaches."""

    def __init__(
        self, recipe: Recipe, arguments: TrainingArguments, parts: ModelParts, config: Any
    ) -> None:
        """Measures what the device of this process can do."""
        self._recipe, self._arguments = recipe, arguments
        self._flops = flops_per_token(recipe, parts, config)
        dtype = torch.bfloat16 if recipe.bf16 else torch.float32
        self._rates = measured_rates(arguments.device, dtype)
        self._last: tuple[float, int] | None = None
        self._told = 0

    def share(self, tokens: int) -> float | None:
        """Since the last call, of all processes' devices; None at the first call.

        Args:
            tokens: seen so far, by all processes.
        """
        now = time.perf_counter(), tokens
        last, self._last = self._last, now
        if last is None or now[0] <= last[0]:
            return None
        self._told += 1
        reached = self._flops * (now[1] - last[1]) / (now[0] - last[0])
        processes: int = self._arguments.world_size
        return reached / (self._rates.flops * processes)

    def warning(self, share: float) -> str | None:
        """What keeps a GPU idle, said once: at the second share, for the first may compile."""
        if self._told != 2 or share >= LOW_SHARE or self._arguments.device.type != "cuda":
            return None
        reasons = reasons_for_low_share(self._recipe, self._arguments)
        if not reasons:
            return None
        return f"Training reaches {share:.0%} of this GPU's products: {'; '.join(reasons)}."


def reasons_for_low_share(recipe: Recipe, arguments: TrainingArguments) -> list[str]:
    """What can be seen to keep a GPU idle, with what to do about it."""
    tokens = arguments.per_device_train_batch_size * recipe.data.sequence_length
    reasons = {
        f"a micro-batch has {tokens:,} tokens: raise training.per_device_train_batch_size (to "
        f"{-(-LARGE_BATCH // recipe.data.sequence_length)} or more)": tokens < LARGE_BATCH,
        "layers are not compiled: set compile_layers=true": not recipe.compile_layers,
        "products are float32: set bf16=true": not recipe.bf16,
        "losses run without Triton's kernels: install triton": (
            chosen().get("logit_losses") == "torch"
        ),
        "attention is eager: set attn_implementation=sdpa": recipe.attn_implementation == "eager",
        "layers run twice: leave training.gradient_checkpointing out if memory allows": (
            arguments.gradient_checkpointing
        ),
    }
    return [reason for reason, holds in reasons.items() if holds]
