"""Models as their `config.json` describes them, for tests of costs."""

import json
from pathlib import Path
from typing import Any

SHAPES = Path(__file__).parents[1] / "docs" / "shapes"
LLAMA_3_8B: dict[str, Any] = json.loads((SHAPES / "llama-3-8b.json").read_text())
QWEN_3_0_6B: dict[str, Any] = json.loads((SHAPES / "qwen3-0.6b.json").read_text())
TINY: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "multi_exit": {"version": 1, "exit_layers": [1, 2]},
}
