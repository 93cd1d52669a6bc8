"""Models as their `config.json` describes them, for tests of costs and of training."""

import json
from pathlib import Path
from typing import Any

from exitserve.checkpoint.calibration import Calibration, OperatingPoint
from exitserve.costs.byte_costs import DecoderShape

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

TINY_DECODER = DecoderShape(
    num_layers=4,
    hidden_size=8,
    intermediate_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab_size=32,
    dtype_bytes=2,
)
LLAMA: dict[str, Any] = {
    "architecture": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
"""As the `config` of recipes; `BERT` too."""
BERT: dict[str, Any] = {
    "architecture": "bert",
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def calibration_of(chosen: OperatingPoint, *points: OperatingPoint, **fields: Any) -> Calibration:
    """A calibration, in mode "defer" by the largest probability where `fields` say nothing else."""
    target = f"agreement>={chosen.agreement:g}"
    usual = {"mode": "defer", "criterion": "max_prob", "confidence_level": 0.95}
    return Calibration(target=target, chosen=chosen, points=points, **{**usual, **fields})
