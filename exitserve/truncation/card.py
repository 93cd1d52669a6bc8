"""The model card of a truncated checkpoint, and the files copied along with its weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.repocard import metadata_load

from exitserve.checkpoint.block import MultiExit
from exitserve.checkpoint.hub import CARD
from exitserve.truncation.perplexity import Perplexity

LICENCE_KEYS = ("license", "license_name", "license_link")

_TEMPLATE = """\
# {title}

The first **{kept} of {full}** decoder layers of `{source}`, with its embeddings, final norm and LM
head{own}. An ordinary Hugging Face checkpoint{change}.

| | |
|---|---|
| architecture | `{architecture}` |
| layers | {kept} of {full} |
| exit training | {training} |
| exits left | {exits} |
| perplexity | {perplexity} |

## Use

```bash
vllm serve {title}                # plain vLLM
exitserve serve {title}           # with exits, where some are left
```

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{title}")
tokenizer = AutoTokenizer.from_pretrained("{title}")
```

Made by `exitserve truncate`. For every prompt the next-token distribution is the one that the full
model's norm and head give after {kept} layers.
"""


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """What the card describes."""

    source: str
    """The full model's hub id, or the name of its folder."""
    title: str
    config: Mapping[str, Any]
    """The full model's `config.json`."""
    num_layers: int
    full_depth: int
    block: MultiExit | None
    """The full model's exits."""
    perplexity: Perplexity | None

    @property
    def is_trained(self) -> bool:
        """Whether the head was trained to follow this depth."""
        exits = () if self.block is None else self.block.exit_layers
        return self.num_layers in (*exits, self.full_depth)


def model_card(made: Truncation, licence: Mapping[str, str], *, from_hub: bool) -> str:
    """The card of a truncated checkpoint, with its metadata; the licence is the full model's."""
    metadata: dict[str, Any] = dict(licence)
    if from_hub:
        metadata["base_model"] = made.source
    metadata |= {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["early-exit", "truncated"],
    }
    block = made.block.first(made.num_layers) if made.block else None
    exits = "none" if block is None else ", ".join(map(str, block.exit_layers))
    if block is not None and block.calibration is not None and made.num_layers < made.full_depth:
        exits += "; their thresholds were calibrated for the full depth and promise nothing here"
    names = made.config.get("architectures") or ["unknown"]
    page = _TEMPLATE.format(
        title=made.title,
        kept=made.num_layers,
        full=made.full_depth,
        source=made.source,
        own="" if made.num_layers < made.full_depth else ": all of it",
        change=": nothing was trained or changed",
        architecture=names[0],
        training=_training(made),
        exits=exits,
        perplexity=_measured(made.perplexity),
    )
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n{page}"


def _training(made: Truncation) -> str:
    if made.num_layers == made.full_depth:
        return "none needed: this is the full depth"
    if made.block is None:
        return "none: the head was never trained to follow this depth, so quality is unknown"
    trained = ", ".join(map(str, made.block.exit_layers))
    if made.is_trained:
        return f"objective `{made.block.objective}`, at layers {trained}: this depth is one of them"
    return f"objective `{made.block.objective}`, at layers {trained}: this depth is none of them"


def _measured(found: Perplexity | None) -> str:
    if found is None:
        return "not measured"
    return (
        f"{found.value:.3f}, on {found.tokens:,} tokens of {', '.join(found.files)} (windows of "
        f"{found.window} tokens, float32)"
    )


def licence_of(directory: Path) -> dict[str, str]:
    """The licence in the metadata of a checkpoint's card; empty where there is none."""
    try:
        metadata = metadata_load(directory / CARD) or {}
    except (OSError, ValueError, yaml.YAMLError):  # there is none, or it is broken
        return {}
    return {key: str(metadata[key]) for key in LICENCE_KEYS if metadata.get(key)}
