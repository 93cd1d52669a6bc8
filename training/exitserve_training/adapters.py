"""Low-rank adapters (LoRA): put on by PEFT, kept, and merged into the checkpoint at the end.

With 4-bit maps under them (QLoRA, arXiv 2305.14314) they are merged into what those 4 bits stand
for, not into the weights that the run began from: the adapters were trained beside the former, and
so the checkpoint is the model that the report measured.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from exitserve.checkpoint import MultiExit, write_multi_exit
from exitserve.errors import ExitServeError
from exitserve_training.recipe import Lora, Recipe

FOLDER = "adapter"
"""Of a run's `output_dir`."""


def with_adapters(model: PreTrainedModel, lora: Lora) -> nn.Module:
    """The model with low-rank adapters in its linear maps; all else is frozen.

    Raises:
        ExitServeError: the target modules are not in the model.
    """
    try:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ModuleNotFoundError as error:
        raise ExitServeError(
            f"lora needs the package {error.name!r}; install the extra: "
            f"pip install 'exitserve[train]'."
        ) from error
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
    module: nn.Module = adapted
    return module


def check_four_bits() -> None:
    """Raises `ExitServeError` where bitsandbytes is missing."""
    if find_spec("bitsandbytes") is None:
        raise ExitServeError(
            "lora.quantization=nf4 needs the package 'bitsandbytes'; install the extra: "
            "pip install 'exitserve[qlora]'."
        )


def four_bits(compute: torch.dtype) -> BitsAndBytesConfig:
    """QLoRA's quantization: NF4 in blocks, their scales quantized too; products in `compute`."""
    config: Any = BitsAndBytesConfig  # untyped in transformers
    quantization: BitsAndBytesConfig = config(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )
    return quantization


def keep_for_training(model: PreTrainedModel) -> PreTrainedModel:
    """The 4-bit model as backward can read it, on a CPU too.

    There bitsandbytes 0.50 packs maps anew in their first pass without gradients, which evaluation
    makes, and rounds their scales to bfloat16.
    """
    modules: Any = model.modules()
    for module in modules:
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


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


def merged(adapted: nn.Module, lora: Lora) -> PreTrainedModel:
    """The model with its adapters added to its weights, in place; 4-bit ones become whole first."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    model: Any = adapted
    if lora.quantization is not None:
        trained = get_peft_model_state_dict(model)
        model = with_adapters(model.unload().dequantize(), lora)
        set_peft_model_state_dict(model, trained)
    whole: PreTrainedModel = model.merge_and_unload()
    return whole
