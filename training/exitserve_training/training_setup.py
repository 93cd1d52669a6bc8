"""What is checked of a recipe before its data are read, and what is known then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from exitserve.checkpoint.block import MultiExit
from exitserve.errors import ExitServeError
from exitserve_training.adapters import with_adapters
from exitserve_training.growth import grown_config
from exitserve_training.layer_weights import counted_layers
from exitserve_training.models import build_config, build_model, check_model, model_config, task_for
from exitserve_training.objectives.aligned.options import KLToLastOptions
from exitserve_training.optimizers import check_kahan
from exitserve_training.parts import Task
from exitserve_training.recipe import Recipe


@dataclass(frozen=True)
class TrainingSetup:
    """What is known of a run before its data are read."""

    config: PreTrainedConfig
    task: Task
    exits: MultiExit
    """The block for `config.json`."""


def training_setup(recipe: Recipe) -> TrainingSetup:
    """Checks all that the recipe says about its model and layers, without reading data.

    Raises:
        ExitServeError: something cannot be done.
    """
    if recipe.model is not None:
        task = task_for(model_config(recipe.model).model_type, recipe.data.format)
        config = check_model(recipe.model, task)
        if recipe.grow_to_layers is not None:
            config = grown_config(config, recipe.grow_to_layers)
    else:
        assert recipe.config is not None
        config = build_config(recipe.config)
        task = task_for(config.model_type, recipe.data.format)
    if recipe.weights == "bfloat16":
        check_kahan()
    num_layers: int = config.num_hidden_layers
    chosen: Sequence[int] | None = None if recipe.exit_layers == "all" else recipe.exit_layers
    layers = counted_layers(num_layers, chosen)[:-1]
    exits = MultiExit(exit_layers=layers, objective="+".join(o.name for o in recipe.objectives))
    for options in recipe.objectives:
        options.layers_used(layers, num_layers)  # raises where it does not fit
    if recipe.lora is not None:
        with torch.device("meta"):
            with_adapters(build_model(config, task), recipe.lora)
    # From scratch the tokenizer has the last word.
    check_teacher(recipe, task, None if recipe.model is None else config.vocab_size)
    if task == "hidden token":
        if recipe.exit_aware is not None:
            raise ExitServeError("recipe key 'exit_aware' is for causal models; leave it out.")
    elif "mask_share" in recipe.model_fields_set:
        raise ExitServeError("recipe key 'mask_share' is for masked models, such as bert.")
    return TrainingSetup(config, task, exits)


def check_teacher(recipe: Recipe, task: Task, vocabulary: int | None) -> None:
    """Raises `ExitServeError` for a teacher that says something else than the model."""
    for options in recipe.objectives:
        path = options.teacher_path(recipe.model) if isinstance(options, KLToLastOptions) else None
        if path is None:
            continue
        if task == "class":
            raise ExitServeError(
                f"objective {options.name!r}: teacher is for language models, not for "
                f"classifiers; leave it out."
            )
        size = check_model(path, task).vocab_size
        if vocabulary is not None and size != vocabulary:
            raise ExitServeError(
                f"objective {options.name!r}: the teacher '{path}' has a vocabulary of {size}, "
                f"the model one of {vocabulary}; give a teacher with the same tokenizer."
            )
