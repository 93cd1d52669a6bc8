"""Synthetic checkpoints: shapes with random weights, whose exits are forced.

They measure the machinery (layers saved, checks, propagation, the engine's step) at sizes for which
no trained checkpoint is at hand. They say nothing about quality.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from exitserve.errors import ExitServeError, nearest

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 24,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-350m": {
        **_LLAMA,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    "llama-1.3b": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
"""Name to `config.json`."""

NEVER_PASSED = 0.99
"""A threshold that is checked and never passed: random weights give confidences near 1/V."""
PROMPT_TOKENS = 32
"""Default of --prompt-tokens."""
MIN_CONTEXT = 512
"""Least context of the engines: enough for short prompts and a few hundred tokens."""


def check_name(name: str) -> None:
    """Raises `ExitServeError` unless `name` is a synthetic shape."""
    if name not in SHAPES:
        raise ExitServeError(
            f"unknown synthetic model {name!r}.{nearest(name, SHAPES)} "
            f"Available: {', '.join(SHAPES)}."
        )


def write_checkpoint(name: str, directory: Path) -> None:
    """Writes the `config.json` of a synthetic shape; the engine draws the weights."""
    check_name(name)
    text = json.dumps(SHAPES[name], indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")


def context_for(name: str, prompt_tokens: int, max_tokens: int) -> int:
    """The context to start the engines with: as long as the requests need, at least `MIN_CONTEXT`.

    Raises:
        ExitServeError: the requests are longer than the shape's context.
    """
    longest: int = SHAPES[name]["max_position_embeddings"]
    needed = prompt_tokens + max_tokens
    if needed > longest:
        raise ExitServeError(
            f"--prompt-tokens {prompt_tokens} with --max-tokens {max_tokens} exceeds the context "
            f"of {name}, {longest} tokens: lower one of them."
        )
    return max(MIN_CONTEXT, needed)


def random_prompts(
    vocab_size: int, count: int, prompt_tokens: int = PROMPT_TOKENS, seed: int = 0
) -> list[list[int]]:
    """`count` prompts of `prompt_tokens` random token ids, without the special ones (0 to 2)."""
    generator = random.Random(seed)
    return [
        [generator.randrange(3, vocab_size) for _ in range(prompt_tokens)] for _ in range(count)
    ]
