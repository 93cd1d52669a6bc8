"""The recipe's `training` as arguments of the Hugging Face Trainer, or of TRL's for chats."""

import dataclasses
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from torch.optim import SGD
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.integrations.integration_utils import get_available_reporting_integrations
from transformers.trainer_utils import SaveStrategy
from transformers.utils.import_utils import is_liger_kernel_available

from exitserve.errors import ExitServeError, nearest
from exitserve_training.mistakes import explain
from exitserve_training.recipe import Recipe

_OURS = {
    "output_dir": "output_dir",
    "overwrite_output_dir": "overwrite",
    "seed": "seed",
    "data_seed": "seed",
    "bf16": "bf16",
    "resume_from_checkpoint": "resume",
    "torch_compile": "compile_layers",
    "max_length": "data.sequence_length",
    "packing": "data.packing",
    "completion_only_loss": "data.loss_on",
    "assistant_only_loss": "data.loss_on",
    # Newer names, from transformers 5.23 on: one recipe is for all versions.
    "activation_checkpointing": "training.gradient_checkpointing",
    "activation_checkpointing_kwargs": "training.gradient_checkpointing_kwargs",
}
"""Training arguments that a key of the recipe sets."""

_SETTLED: dict[str, Any] = {
    # The data have no column that the loss does not need.
    "remove_unused_columns": False,
    "label_names": ["labels"],
}
"""Training arguments that have no other value here."""

_COUNTED = {"text": "all", "images": "no"}
"""What the Trainer counts as tokens seen, where there is no padding."""

NO_DEEPSPEED = (
    "DeepSpeed is not supported; shard with FSDP 2: `accelerate launch --use_fsdp --fsdp_version 2 "
    "-m exitserve train ...`."
)

_LEAST = {"learning_rate": 0} | dict.fromkeys(
    ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"), 1
)
"""Training arguments that would fail late with a lower value."""

_OF_TRL = {"activation_offloading", "pad_to_multiple_of"}
"""TRL's arguments that work here; this package prepares chats and computes their loss."""


def training_arguments(recipe: Recipe) -> TrainingArguments:
    """Checks the recipe's `training` and adds this project's defaults.

    Raises:
        ExitServeError: unknown or contradictory keys, bad values, or a package that is missing.
    """
    kind: type[TrainingArguments] = TrainingArguments
    if recipe.data.format == "chat":
        from trl.trainer.sft_config import SFTConfig

        kind = SFTConfig
    given = _checked(recipe, kind)
    fixed: dict[str, Any] = {
        "output_dir": recipe.output_dir,
        "seed": recipe.seed,
        "bf16": recipe.bf16,
        "report_to": given.get("report_to") or "tensorboard",
        "restore_callback_states_from_checkpoint": recipe.resume,
        **_SETTLED,
    }
    if recipe.adagc is not None:
        fixed["max_grad_norm"] = 0.0
    if recipe.data.format == "chat":
        fixed["dataset_kwargs"] = {"skip_prepare_dataset": True}
    if "gradient_checkpointing_kwargs" in given:
        kept = given["gradient_checkpointing_kwargs"] or {}
        given["gradient_checkpointing_kwargs"] = {**kept, "use_reentrant": False}
    given = {**_defaults(recipe), **given, **fixed}
    # YAML reads `no` as false.
    given = {k: "no" if v is False and k.endswith("_strategy") else v for k, v in given.items()}
    if hasattr(kind, "activation_checkpointing"):
        given = {k.replace("gradient_ch", "activation_ch"): value for k, value in given.items()}
    try:
        arguments = kind(**given)
        _check_packages(arguments)
        return arguments
    except (TypeError, ValueError, ImportError) as error:
        raise ExitServeError(f"recipe key 'training': {' '.join(str(error).split())}") from error


def _defaults(recipe: Recipe) -> dict[str, Any]:
    best = str(recipe.training.get("metric_for_best_model") or "loss")
    return {
        # The Trainer takes names that end in `loss` alone for losses: loss_layer_6 does not.
        "greater_is_better": not ("loss" in best or "perplexity" in best),
        "logging_steps": 20,
        "save_total_limit": 2,
        "eval_strategy": "no",
        "include_num_input_tokens_seen": _COUNTED.get(recipe.data.format, "non_padding"),
        # Goes into config.json; training passes turn the cache off themselves.
        "use_cache": True,
        "use_cpu": not torch.cuda.is_available(),
        # TRL would turn it on, others off: the same for both.
        "gradient_checkpointing": False,
    }


def _check_packages(arguments: TrainingArguments) -> None:
    """Raises an error for a package that the Trainer would miss after the data are read."""
    available = [str(name) for name in get_available_reporting_integrations()]  # type: ignore[no-untyped-call]
    for name in set(arguments.report_to or ()) - {*available}:
        raise ValueError(
            f"report_to: {name!r} is unknown, or its package is not installed; choose among "
            f"{', '.join(available)}, all, none.{nearest(name, available)}"
        )
    if arguments.use_liger_kernel and not is_liger_kernel_available():
        raise ImportError("use_liger_kernel needs `pip install liger-kernel`; or leave it out.")
    if arguments.optim_target_modules is None:
        Trainer.get_optimizer_cls_and_kwargs(arguments)
    if arguments.save_strategy == SaveStrategy.BEST and arguments.metric_for_best_model is None:
        raise ValueError("save_strategy=best needs metric_for_best_model, such as eval_loss.")
    options: Any = arguments.lr_scheduler_kwargs
    get_scheduler(arguments.lr_scheduler_type, SGD([torch.zeros(1)]), 1, 2, options)


def _checked(recipe: Recipe, kind: type[TrainingArguments]) -> dict[str, Any]:
    """The recipe's `training`, typed; raises `ExitServeError` with all that is wrong with it."""
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    unused = {field.name for field in dataclasses.fields(kind)} - known - _OF_TRL
    problems = [_problem(*item, unused) for item in recipe.training.items()]
    model, values = training_model(kind), dict[str, Any]()
    try:
        values = model.model_validate(recipe.training).model_dump(exclude_unset=True)
    except ValidationError as error:
        problems.append(explain(error, model, "training."))
    if found := list(filter(None, problems)):
        raise ExitServeError(" ".join(found))
    return values


def training_model(kind: type[TrainingArguments]) -> type[BaseModel]:
    """A pydantic class with the arguments' fields; types that are not simple are left to them."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        hint = get_type_hints(kind)[field.name]
        if not {*get_args(hint)} <= {bool, int, float, NoneType} or hint is str:
            hint = Any
        least, text = _LEAST.get(field.name), field.metadata.get("help")
        fields[field.name] = (Annotated[hint, Field(ge=least, description=text)], None)
    config = ConfigDict(extra="forbid", protected_namespaces=())
    model: type[BaseModel] = create_model("training", __config__=config, **fields)
    return model


def _problem(key: str, value: Any, unused: set[str]) -> str | None:
    """Why a key may not stand in `training`, or not with this value."""
    name = f"recipe key 'training.{key}'"
    if key in _OURS:
        return f"{name}: set {_OURS[key]!r} instead."
    if key in unused:
        return (
            f"{name} has no effect: chats are cut, padded and packed as data says, and the loss "
            f"is that of objectives; leave it out."
        )
    if key in _SETTLED and value != _SETTLED[key]:
        return f"{name} is always {_SETTLED[key]!r} here; leave it out."
    if key == "deepspeed" and value:
        return NO_DEEPSPEED
    if key == "gradient_checkpointing_kwargs" and dict(value or {}).get("use_reentrant"):
        return f"{name}: use_reentrant=true would cut the inner layers' losses off; leave it out."
    if key == "push_to_hub" and value:
        return (
            f"{name} would upload the data too; leave it out, and upload the result: `hf upload "
            f"USER/NAME OUTPUT_DIR . --exclude 'data/*' 'logs/*' 'checkpoint-*'`."
        )
    if key == "label_smoothing_factor" and value:
        return f"{name}: no objective smooths its labels; leave it out."
    return None


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of recipe files, for editors."""
    schema = Recipe.model_json_schema()
    training = training_model(TrainingArguments).model_json_schema()
    for key in _OURS.keys() & training["properties"].keys():
        del training["properties"][key]
    schema["properties"]["training"] = training
    schema["properties"]["base"] = {"type": "string", "description": "A recipe to lie over."}
    # Keys may come from the base, or from the command line.
    del schema["required"]
    return schema
