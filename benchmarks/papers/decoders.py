"""The small decoder on which studies of pretraining compare objectives."""

from __future__ import annotations

from typing import Any

Recipe = dict[str, Any]


def decoder(novels: list[str], objectives: list[Any], **config: Any) -> Recipe:
    """A recipe that pretrains a Llama on novels: 400 steps of 4 x 256 tokens.

    Args:
        novels: text files; the last two are held out.
        objectives: as a recipe has them.
        config: changes to the model.
    """
    return {
        "config": {
            "architecture": "llama",
            "num_hidden_layers": 5,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            **config,
        },
        "tokenizer": {"train_bpe": {"vocab_size": 2048}},
        "data": {
            "files": novels[:-2],
            "validation_files": novels[-2:],
            "max_bytes": 2_000_000,
            "sequence_length": 256,
            "validation_blocks": 64,
        },
        "exit_layers": [],
        "objectives": objectives,
        "training": {
            "max_steps": 400,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 8,
            "learning_rate": 2.0e-3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 40,
            "weight_decay": 0.1,
            "adam_beta2": 0.95,
            "eval_strategy": "steps",
            "eval_steps": 50,
        },
    }
