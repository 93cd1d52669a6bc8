"""The model card of a trained checkpoint."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from exitserve.checkpoint.block import MultiExit
from exitserve.truncation.card import licence_of
from exitserve_training.recipe import Recipe
from exitserve_training.report import TrainingReport

_TEMPLATE = """\
---
{{ card_data }}
---

# {{ title }}

{{ source }} with exits: its {{ head }} can also be read after layers {{ exits }} of
{{ layers }}. An ordinary Hugging Face checkpoint, with a `multi_exit` block in `config.json`.

## Quality, on what was held out

{{ quality }}

{{ verdict }}

{% if says == "next token" -%}
## Use

`exitserve serve {{ title }}` serves it with exits, `vllm serve {{ title }}` at full depth.

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{{ title }}")
model.generate(**inputs, assistant_early_exit={{ first }})   # full depth's tokens: the exit drafts
```

{% endif -%}
Made by `exitserve train` (recipe and versions: `training_run.json`).
"""
_TASKS = {"next token": "text-generation", "hidden token": "fill-mask"}
_HEADS = {"next token": "final norm and LM head", "hidden token": "LM head", "class": "classifier"}


def model_card(recipe: Recipe, report: TrainingReport, exits: MultiExit) -> ModelCard:
    """The card, with the base's licence and the quality at each exit."""
    # Of a directory only the name: its path may reveal something about the user's machine.
    local = Path(recipe.model or "").is_dir()
    source = "A model trained from scratch"
    if recipe.model is not None:
        source = f"`{Path(recipe.model).resolve().name if local else recipe.model}`"
    licence: dict[str, Any] = dict(licence_of(Path(str(recipe.model)))) if local else {}
    data = ModelCardData(
        **licence,
        base_model=None if local else recipe.model,
        library_name="transformers",
        pipeline_tag=_TASKS.get(report.says),
        tags=["early-exit", "exitserve"],
    )
    card: ModelCard = ModelCard.from_template(
        data,
        template_str=_TEMPLATE,
        title=report.model,
        source=source,
        says=report.says,
        head=_HEADS[report.says],
        exits=", ".join(map(str, exits.exit_layers)),
        layers=report.num_layers,
        quality=report.quality_table(),
        verdict=exits.verdict or "",
        first=exits.exit_layers[0],
    )
    return card
