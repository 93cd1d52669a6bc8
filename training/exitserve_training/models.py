"""The model to train: from scratch by a config, or loaded from a directory or hub id."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from exitserve.checkpoint.block import read_config, read_multi_exit
from exitserve.errors import ExitServeError, nearest
from exitserve_training.losses import OutputHead
from exitserve_training.parts import ENCODERS, ENDINGS, TRAINABLE, VISION, Task

_SUPPORTED = f"supported families: {', '.join(TRAINABLE)}"


def task_for(family: str, data_format: str) -> Task:
    """The task that a model of this family is trained for on such data.

    Raises:
        ExitServeError: the family cannot be trained on the format.
    """
    if (family in VISION) != (data_format == "images"):
        raise ExitServeError(
            f"a model of type {family!r} cannot be trained on data.format={data_format}; images "
            f"are for {', '.join(VISION)}, and those for images alone."
        )
    if data_format == "labelled" and family not in ENCODERS:
        raise ExitServeError(
            f"a model of type {family!r} cannot be trained on data.format=labelled; texts are "
            f"classified by {', '.join(ENCODERS)}."
        )
    if data_format == "chat" and family in ENCODERS:
        raise ExitServeError("data.format=chat is for causal models.")
    if data_format in ("labelled", "images"):
        return "class"
    return "hidden token" if family in ENCODERS else "next token"


def model_config(path: str) -> PreTrainedConfig:
    """Reads the config of a directory or hub id.

    Raises:
        ExitServeError: missing, or of a family that is not supported.
    """
    if Path(path).exists() or path.startswith((".", "/", "~")):
        read_config(path)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ExitServeError(
            f"no model at '{path}': no checkpoint directory, and no hub id that can be reached."
        ) from error
    if config.model_type not in TRAINABLE:
        raise ExitServeError(f"'{path}' is of model type {config.model_type!r}; {_SUPPORTED}.")
    return config


def check_model(path: str, task: Task | None = None) -> PreTrainedConfig:
    """Reads the config of a directory or hub id and makes sure it can be trained for a task:
    without one, for tokens as its family predicts them.

    Raises:
        ExitServeError: missing, of a family that is not supported, or made for another task.
    """
    config = model_config(path)
    if task is None:
        task = "hidden token" if config.model_type in ENCODERS else "next token"
    endings = ENDINGS[task]
    if task == "class":
        # A classifier can start from another one, a masked language model, or a model without head.
        endings = (*endings, *ENDINGS["hidden token"], "Model")
    for architecture in config.architectures or []:
        if not architecture.endswith(endings):
            kinds = {"class": "classifier", "hidden token": "masked language model"}
            kind = kinds.get(task, "causal language model")
            raise ExitServeError(f"'{path}' is a {architecture}, not a {kind}; {_SUPPORTED}.")
    return config


def load_model(
    path: str,
    task: Task | None = None,
    classes: Sequence[str] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Loads a model, in float32 (`bf16: true` computes in bfloat16 all the same).

    Args:
        path: directory or hub id.
        task: as `check_model`.
        classes: names of the classes to predict; where the model has another number of
            classes, its head is initialised anew. None: those of the model.
        dtype: of the weights.
    """
    config = check_model(path, task)
    options: dict[str, Any] = {}
    if classes is not None:
        options = {**_names(classes), "ignore_mismatched_sizes": True}
    try:
        model: PreTrainedModel = _auto(config, task).from_pretrained(path, dtype=dtype, **options)
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ExitServeError(f"the weights of '{path}' could not be loaded: {reason}") from error
    return model


def model_to_run(
    path: str, task: Task | None = None, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A model as `load_model` has it, in evaluation mode, on the GPU if there is one."""
    model = load_model(path, task, dtype=dtype)
    model.train(False)
    if torch.cuda.is_available():
        torch.nn.Module.cuda(model)
    return model


def trained_exits(path: str) -> list[int] | None:
    """The exit layers of a checkpoint's directory; None where it does not say."""
    known = read_multi_exit(path) if Path(path).is_dir() else None
    return None if known is None else list(known.exit_layers)


def known_classes(config: PreTrainedConfig) -> list[str]:
    """The names of a classifier's classes, in the order of their numbers."""
    return [str(name) for _, name in sorted((config.id2label or {}).items())]


def freeze_head(model: PreTrainedModel, head: OutputHead) -> None:
    """Headless training leaves the head as it is, and data parallelism must not wait for it."""
    embedding: Any = model.get_input_embeddings()
    parameters = [*head.linear.parameters()]
    if model.config.model_type in ENCODERS:
        parameters += head.norm.parameters()  # a masked model's head has a transform of its own
    for parameter in parameters:
        if parameter is not embedding.weight:
            parameter.requires_grad_(False)


def _names(classes: Sequence[str]) -> dict[str, Any]:
    return {
        "id2label": dict(enumerate(classes)),
        "label2id": {name: number for number, name in enumerate(classes)},
    }


def start_head_from_embeddings(model: PreTrainedModel) -> None:
    """Copies the input embeddings into the LM head: how a headless model gets one.

    Headless paper, section 4.2. Where head and embeddings are one tensor there is nothing to do.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding: Any = model.get_input_embeddings()
    if head.weight is not embedding.weight:
        with torch.no_grad():
            head.weight.copy_(embedding.weight)


def choose_attention(model: PreTrainedModel, implementation: str) -> None:
    """Lets all layers compute attention by one of transformers' implementations.

    Raises:
        ExitServeError: this model or this machine cannot run it.
    """
    try:
        model.set_attn_implementation(implementation)
    except (ImportError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ExitServeError(
            f"attn_implementation={implementation} cannot be used here: {reason} Leave it out for "
            f"what transformers chooses."
        ) from error


def build_config(
    recipe: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
    classes: Sequence[str] | None = None,
) -> PreTrainedConfig:
    """Turns the recipe's `config` into a Hugging Face config that fits tokenizer and classes.

    Without a tokenizer only its depth and sizes are to be trusted.

    Raises:
        ExitServeError: unknown architecture or size key.
    """
    # A key that a recipe sets to null has the family's default again.
    sizes = {key: value for key, value in recipe.items() if value is not None}
    family = str(sizes.pop("architecture"))
    if family not in TRAINABLE:
        raise ExitServeError(
            f"config.architecture {family!r} is not supported; allowed: {', '.join(TRAINABLE)}."
            f"{nearest(family, TRAINABLE)}"
        )
    default = AutoConfig.for_model(family)
    known = {*default.to_dict(), *default.attribute_map}
    for key in sizes:
        if key not in known:
            raise ExitServeError(
                f"recipe key 'config.{key}' is unknown to {family}.{nearest(key, sorted(known))}"
            )
    # A list, which transformers reads where a family (deit) has two classes for a task.
    special: dict[str, Any] = {"architectures": []}
    if tokenizer is not None:
        sizes.setdefault("vocab_size", len(tokenizer))
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        special |= {name: getattr(tokenizer, name) for name in names}
    if classes is not None:
        special |= _names(classes)
    try:
        config: PreTrainedConfig = AutoConfig.for_model(family, **{**special, **sizes})
    except (StrictDataclassError, ArithmeticError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ExitServeError(f"recipe key 'config': {reason}") from error
    return config


def build_model(
    config: PreTrainedConfig, task: Task | None = None, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A freshly initialised model; the caller seeds the generator."""
    try:
        model: PreTrainedModel = _auto(config, task).from_config(config, dtype=dtype)
    except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ExitServeError(f"recipe key 'config': {type(error).__name__}: {reason}") from error
    return model


def _auto(config: PreTrainedConfig, task: Task | None) -> Any:
    """The auto class, untyped in transformers."""
    family = config.model_type
    if task == "class":
        texts, images = AutoModelForSequenceClassification, AutoModelForImageClassification
        return images if family in VISION else texts
    return AutoModelForMaskedLM if family in ENCODERS else AutoModelForCausalLM


def check_saving(model: PreTrainedModel, folder: Path) -> None:
    """Saves the model's configs for once: raises `ExitServeError` before a run is lost by them."""
    generation: Any = getattr(model, "generation_config", None)
    try:
        model.config.save_pretrained(folder)
        if generation is not None:
            _make_savable(generation)
            generation.save_pretrained(folder)
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        raise ExitServeError(
            f"the trained model could not be saved, because of its config.json or "
            f"generation_config.json; mend them: {reason}"
        ) from error


def _make_savable(generation: Any) -> None:
    """What says how to sample without `do_sample` is loaded, but not saved."""
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True
        print("generation_config.json says how to sample: do_sample is set to true in it.")


def check_fits(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
    """Raises `ExitServeError` unless sequences of this tokenizer and length fit the model."""
    if len(tokenizer) > config.vocab_size:
        raise ExitServeError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocabulary only "
            f"{config.vocab_size}; use the model's own tokenizer, or from scratch raise "
            f"config.vocab_size. To give a model more tokens, save it once after transformers' "
            f"model.resize_token_embeddings({len(tokenizer)}), and train that."
        )
    if length > config.max_position_embeddings:
        raise ExitServeError(
            f"data.sequence_length={length} is longer than the model's context of "
            f"{config.max_position_embeddings} tokens; lower it."
        )
