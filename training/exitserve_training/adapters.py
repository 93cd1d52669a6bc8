"""Low-rank adapters (LoRA): put on by PEFT, kept, and merged into the checkpoint at the end."""

import re
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from exitserve.checkpoint.block import MultiExit, write_multi_exit
from exitserve.errors import ExitServeError, nearest
from exitserve_training.recipe import Lora, Recipe

FOLDER = "adapter"
"""Of a run's `output_dir`."""


def with_adapters(model: PreTrainedModel, lora: Lora) -> nn.Module:
    """The model with low-rank adapters in its linear maps; all else is frozen.

    Raises:
        ExitServeError: the target modules are not in the model.
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not isinstance(lora.target_modules, str):
        _check_names(model, lora.target_modules)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # a float works; PEFT annotates int
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None,
        # GPT-2's maps keep their weights the other way round.
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    try:
        adapted: Any = get_peft_model(model, config)
    except (ValueError, re.error) as error:
        reason = " ".join(str(error).split())
        raise ExitServeError(f"recipe key 'lora.target_modules': {reason}") from error
    ends = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[no-untyped-call]
    if any(isinstance(end, BaseTunerLayer) for end in ends):
        raise ExitServeError(
            f"recipe key 'lora.target_modules': {lora.target_modules!r} includes the embeddings "
            f"or the head, which every exit shares and lora leaves alone; name maps inside the "
            f"layers, or all-linear."
        )
    # No cards in the run's checkpoints.
    adapted.create_or_update_model_card = lambda _folder: None
    return cast(nn.Module, adapted)


def _check_names(model: nn.Module, targets: list[str]) -> None:
    """Raises `ExitServeError` for a name that nothing has, which PEFT passes over beside others."""
    names = [name for name, _ in model.named_modules()]
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            raise ExitServeError(
                f"recipe key 'lora.target_modules': no module is called {target!r}."
                f"{nearest(target, {name.rpartition('.')[2] for name in names})}"
            )


def save_adapter(adapted: nn.Module, recipe: Recipe, exits: MultiExit, tokenizer: Any) -> None:
    """Writes the adapter and its exits into the run's folder, for `--adapter` and for PEFT.

    With a tokenizer of its own where the recipe gave one: else it is the base's. A model that was
    grown has no base, so its adapter would be of no use.
    """
    if recipe.grow_to_layers is not None:
        return
    model: Any = adapted
    folder = Path(recipe.output_dir) / FOLDER
    model.peft_config["default"].base_model_name_or_path = recipe.model
    # Else PEFT asks the hub for the base's config, to see whether its vocabulary has grown.
    model.save_pretrained(folder, save_embedding_layers=False)
    write_multi_exit(folder, exits)
    if recipe.tokenizer is not None:
        tokenizer.save_pretrained(folder)
