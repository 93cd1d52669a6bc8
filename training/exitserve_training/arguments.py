"""The recipe's `training` as arguments of the Hugging Face Trainer, or of TRL's for chats."""

import dataclasses
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.integrations.integration_utils import get_available_reporting_integrations

from exitserve.errors import ExitServeError, nearest
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
}
"""Training arguments that a key of the recipe sets."""

TENSORBOARD = "tensorboard"

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

_OF_TRL = {"activation_offloading", "pad_to_multiple_of"}
"""TRL's arguments that work here; this package prepares chats and computes their loss."""


def training_arguments(recipe: Recipe) -> TrainingArguments:
    """Checks the recipe's `training` and adds this project's defaults.

    Raises:
        ExitServeError: an unknown or contradictory key, or a bad value.
    """
    kind = _arguments_class(recipe)
    _check_keys(recipe, kind)
    fixed: dict[str, Any] = {
        "output_dir": recipe.output_dir,
        "seed": recipe.seed,
        "bf16": recipe.bf16,
        # The TensorBoard callback is given explicitly, to choose its folder.
        "report_to": [name for name in reporters(recipe) if name != TENSORBOARD] or "none",
        "restore_callback_states_from_checkpoint": recipe.resume,
        **_SETTLED,
    }
    if recipe.adagc is not None:
        fixed["max_grad_norm"] = 0.0
    if recipe.data.format == "chat":
        fixed["dataset_kwargs"] = {"skip_prepare_dataset": True}
    given = dict(recipe.training)
    if given.get("gradient_checkpointing"):
        given["gradient_checkpointing_kwargs"] = _checkpointing(given)
    try:
        return kind(**{**_defaults(recipe), **given, **fixed})
    except (TypeError, ValueError) as error:
        raise ExitServeError(f"recipe key 'training': {' '.join(str(error).split())}") from error


def reporters(recipe: Recipe) -> list[str]:
    """Where the run logs to, as `training.report_to` says; by default TensorBoard.

    Raises:
        ExitServeError: an unknown name, or one whose package is not installed.
    """
    given = recipe.training.get("report_to") or TENSORBOARD
    names: list[str] = [given] if isinstance(given, str) else list(given)
    if "none" in names:
        return []
    available = [str(name) for name in get_available_reporting_integrations()]  # type: ignore[no-untyped-call]
    for name in names:
        if name not in (*available, "all"):
            raise ExitServeError(
                f"recipe key 'training.report_to': {name!r} is unknown, or its package is not "
                f"installed; choose among {', '.join(available)}, all, none."
                f"{nearest(name, available)}"
            )
    return available if "all" in names else names


def _defaults(recipe: Recipe) -> dict[str, Any]:
    return {
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


def _arguments_class(recipe: Recipe) -> type[TrainingArguments]:
    if recipe.data.format != "chat":
        return TrainingArguments
    from trl.trainer.sft_config import SFTConfig

    kind: type[TrainingArguments] = SFTConfig
    return kind


def _check_keys(recipe: Recipe, kind: type[TrainingArguments]) -> None:
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    unused = {field.name for field in dataclasses.fields(kind)} - known
    if unused:
        known |= _OF_TRL
    for key in recipe.training:
        if key in _OURS:
            raise ExitServeError(f"recipe key 'training.{key}': set {_OURS[key]!r} instead.")
        if key in unused - _OF_TRL:
            raise ExitServeError(
                f"recipe key 'training.{key}' has no effect: chats are cut, padded and packed as "
                f"data says, and the loss is that of objectives; leave it out."
            )
        if key not in known:
            raise ExitServeError(
                f"recipe key 'training.{key}' is unknown.{nearest(key, sorted(known))} "
                f"Allowed: the fields of transformers.TrainingArguments."
            )
        if key in _SETTLED and recipe.training[key] != _SETTLED[key]:
            raise ExitServeError(
                f"recipe key 'training.{key}' is always {_SETTLED[key]!r} here; leave it out."
            )
        if key == "deepspeed" and recipe.training[key]:
            raise ExitServeError(NO_DEEPSPEED)
        if key == "push_to_hub" and recipe.training[key]:
            raise ExitServeError(
                f"recipe key 'training.{key}' would upload the data too; leave it out, and upload "
                f"the result: `hf upload USER/NAME {recipe.output_dir} . --exclude 'data/*' "
                f"'logs/*' 'checkpoint-*'`."
            )
        if key == "label_smoothing_factor" and recipe.training[key]:
            raise ExitServeError(
                f"recipe key 'training.{key}': no objective smooths its labels; leave it out."
            )


def _checkpointing(given: dict[str, Any]) -> dict[str, Any]:
    """Gradient checkpointing that works with the hooks of `forward`."""
    options = dict(given.get("gradient_checkpointing_kwargs") or {})
    if options.get("use_reentrant"):
        raise ExitServeError(
            "recipe key 'training.gradient_checkpointing_kwargs': use_reentrant=true would cut "
            "the inner layers' losses off; leave it out."
        )
    return {**options, "use_reentrant": False}
