"""Synthetic checkpoints: a shape with random weights, whose exits are forced.

They measure the machinery (layers saved, checks, propagation, the engine's own step) at sizes
for which no trained checkpoint is at hand. They say nothing about quality: depth is forced.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from exitserve.errors import ExitServeError, nearest

SHAPES: dict[str, dict[str, Any]] = {
    "llama-350m": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    },
}
"""Name to `config.json`."""

NEVER_PASSED = 0.99
"""Random weights give confidences near 1/V, so this threshold checks and never exits."""
PROMPT_TOKENS = 32


def check_name(name: str) -> None:
    """Raises `ExitServeError` unless `name` is a synthetic shape."""
    if name not in SHAPES:
        raise ExitServeError(
            f"unknown synthetic model {name!r}.{nearest(name, SHAPES)} "
            f"Available: {', '.join(SHAPES)}."
        )


def write_checkpoint(name: str, directory: Path) -> None:
    """Writes the `config.json` of a synthetic shape; the engine makes up the weights."""
    check_name(name)
    text = json.dumps(SHAPES[name], indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")


def random_prompts(name: str, count: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of `PROMPT_TOKENS` random token ids."""
    generator = random.Random(seed)
    vocab_size: int = SHAPES[name]["vocab_size"]
    return [
        [generator.randrange(3, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)
    ]
