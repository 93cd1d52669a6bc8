"""The model card of a truncated checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard import metadata_load

from exitserve.checkpoint.block import MultiExit, num_layers_of, parse_multi_exit
from exitserve.checkpoint.hub import CARD
from exitserve.truncation.job import TruncationJob
from exitserve.truncation.perplexity import Perplexity

LICENCE_KEYS = ("license", "license_name", "license_link")

_TEMPLATE = """\
---
{{ card_data }}
---

# {{ title }}

The first **{{ kept }} of {{ full }}** decoder layers of `{{ source }}`, with its embeddings, final
norm and LM head. An ordinary Hugging Face checkpoint: nothing was trained or changed.

| | |
|---|---|
| architecture | `{{ architecture }}` |
| layers | {{ kept }} of {{ full }} |
| exit training | {{ training }} |
| exits left | {{ exits }} |
| perplexity | {{ perplexity }} |

## Use

```bash
vllm serve {{ title }}                # plain vLLM
exitserve serve {{ title }}           # with exits, where some are left
```

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{{ title }}")
tokenizer = AutoTokenizer.from_pretrained("{{ title }}")
```

Made by `exitserve truncate`. For every prompt the next-token distribution is the one that the full
model's norm and head give after {{ kept }} layers.
"""


def model_card(job: TruncationJob, perplexity: Perplexity | None) -> ModelCard:
    """The card, with the full model's licence, and what is known of the quality at its depth."""
    from_hub = not Path(job.model).is_dir()
    # Only the folder's name: its path may reveal something about the user's machine.
    source = job.model if from_hub else job.directory.resolve().name
    data = ModelCardData(
        **licence_of(job.directory),
        base_model=job.model if from_hub else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["early-exit", "truncated"],
    )
    full, block = num_layers_of(job.config), parse_multi_exit(job.config)
    card: ModelCard = ModelCard.from_template(
        data,
        template_str=_TEMPLATE,
        title=job.out.resolve().name,
        source=source,
        kept=job.num_layers,
        full=full,
        architecture=(job.config.get("architectures") or ["unknown"])[0],
        training=_training(job.num_layers, full, block),
        exits=_exits_left(job.num_layers, full, block),
        perplexity=_measured(perplexity),
    )
    return card


def _training(depth: int, full: int, block: MultiExit | None) -> str:
    if depth == full:
        return "none needed: this is the full depth"
    if block is None:
        return "none: the head was never trained to follow this depth, so quality is unknown"
    trained, which = ", ".join(map(str, block.exit_layers)), "none"
    if depth in block.exit_layers:
        which = "one"
    return f"objective `{block.objective}`, at layers {trained}: this depth is {which} of them"


def _exits_left(depth: int, full: int, block: MultiExit | None) -> str:
    left = None if block is None else block.first(depth)
    if left is None:
        return "none"
    exits = ", ".join(map(str, left.exit_layers))
    if left.calibration is not None and depth < full:
        exits += "; their thresholds were calibrated for the full depth and promise nothing here"
    return exits


def _measured(found: Perplexity | None) -> str:
    if found is None:
        return "not measured"
    return (
        f"{found.value:.3f}, on {found.tokens:,} tokens of {', '.join(found.files)} (windows of "
        f"{found.window} tokens, float32)"
    )


def licence_of(directory: Path) -> dict[str, Any]:
    """The licence in the metadata of a checkpoint's card; empty where there is none."""
    try:
        metadata = metadata_load(directory / CARD) or {}
    except (OSError, ValueError, yaml.YAMLError):  # there is none, or it is broken
        return {}
    return {key: str(metadata[key]) for key in LICENCE_KEYS if metadata.get(key)}
