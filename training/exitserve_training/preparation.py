"""What a run needs before it trains: the model, the data, and the task.

What the recipe says has been checked (`training_setup`). The data are read, and only then is
anything on disk touched.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import DataCollatorWithPadding, PreTrainedModel, default_data_collator, set_seed
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from exitserve.windows import load_tokenizer
from exitserve_training.callbacks import stopped_by_term
from exitserve_training.classification.images import ImageReader
from exitserve_training.draws import Augmentation, Masking
from exitserve_training.folder import HELD_OUT, OWN_CHATS, check_output_dir, empty_folder
from exitserve_training.growth import grow
from exitserve_training.models import (
    build_config,
    build_model,
    check_fits,
    check_saving,
    choose_attention,
    load_model,
    start_head_from_embeddings,
)
from exitserve_training.packing import fingerprint, load_packed, save_packed
from exitserve_training.provenance import training_run, write_training_run
from exitserve_training.reading import chat_tokenizer, read_data
from exitserve_training.recipe import Recipe
from exitserve_training.tasks import (
    ClassOfImage,
    MaskedToken,
    TaskInputs,
    class_of_text,
    next_token,
)
from exitserve_training.tokenization import with_padding
from exitserve_training.training_setup import TrainingSetup, check_teacher


@dataclass(frozen=True)
class TrainerInputs:
    """What the trainer is given: the model, the data, and how batches become inputs."""

    model: PreTrainedModel
    processor: Any
    """The tokenizer, or the image processor: what a checkpoint needs beside its weights."""
    data: datasets.DatasetDict
    task_inputs: TaskInputs
    collator: Any
    architecture: str
    parameters: int
    """How many the model has, counted before adapters or shards change it."""


def prepare(recipe: Recipe, setup: TrainingSetup, is_first: bool) -> TrainerInputs:
    """Reads the data and builds or loads the model; only then is anything on disk touched.

    A run's first process prepares the data; the others read them.

    Raises:
        ExitServeError: the folder is taken, or the data or the model cannot be had.
    """
    if is_first:
        check_output_dir(recipe)
    folder = Path(recipe.output_dir) / "data"
    source = recipe.tokenizer.model_dump_json() if recipe.tokenizer else str(recipe.model)
    key = fingerprint(recipe.data.model_dump_json(exclude_defaults=True), source, str(recipe.seed))
    data = load_packed(folder, key) if recipe.resume or not is_first else None
    has_begun = data is None and recipe.data.own_chats is not None
    if has_begun:
        _write_own_chats(recipe, setup)
    with tempfile.TemporaryDirectory(prefix="exitserve-") as scratch:
        if data is None:
            data, processor = read_data(recipe, setup, Path(scratch))
        else:
            processor = _known_processor(recipe, str(folder))
        set_seed(recipe.seed)
        model = _model(recipe, setup, processor, data)
        check_saving(model, Path(scratch))
        if is_first:
            if not has_begun:
                _begin(recipe)
            if load_packed(folder, key) is None:
                processor.save_pretrained(folder)
                if recipe.data.format == "chat":
                    # Only here, because it loads TRL.
                    from exitserve_training.chats import write_held_out

                    write_held_out(folder / HELD_OUT, data["validation"], processor)
                save_packed(folder, key, data, Path(scratch))
                data = load_packed(folder, key)
    assert data is not None
    task_inputs, collator = _task_inputs(recipe, setup, processor)
    return TrainerInputs(
        model, processor, data, task_inputs, collator, type(model).__name__, model.num_parameters()
    )


def _begin(recipe: Recipe) -> None:
    """Makes the folder of the run, and says in it what runs."""
    write_training_run(empty_folder(recipe), training_run(recipe))


def _write_own_chats(recipe: Recipe, setup: TrainingSetup) -> None:
    """Lets the model write its chats into the folder of the run, where a resumed one finds them."""
    from exitserve_training.own_chats import ChatTurns, write_own_chats

    own, length = recipe.data.own_chats, recipe.data.sequence_length
    assert own is not None and recipe.model is not None
    tokenizer = chat_tokenizer(recipe)
    check_fits(setup.config, tokenizer, length)
    turns = ChatTurns(tokenizer, own.system, length)
    _begin(recipe)
    file = Path(recipe.output_dir) / OWN_CHATS
    file.parent.mkdir(exist_ok=True)
    with stopped_by_term(
        f"stopped by SIGTERM while the model wrote its chats; those that are done are in '{file}'. "
        f"To go on: the same command with resume=true."
    ):
        write_own_chats(file, own, turns, model=recipe.model, length=length, seed=recipe.seed)


def _known_processor(recipe: Recipe, folder: str) -> Any:
    """What the first process, or the first session of the run, has written."""
    if recipe.data.format == "images":
        return ViTImageProcessorPil.from_pretrained(folder)
    path = recipe.tokenizer.path if recipe.tokenizer else recipe.model
    return load_tokenizer(path or folder)


def _model(recipe: Recipe, setup: TrainingSetup, processor: Any, data: Any) -> PreTrainedModel:
    names = data["train"].features["labels"].names if setup.task == "class" else None
    tokenizer = processor if recipe.data.format != "images" else None
    dtype = torch.bfloat16 if recipe.weights == "bfloat16" else torch.float32
    if recipe.model is not None:
        model = load_model(recipe.model, setup.task, names, dtype=dtype)
        if recipe.grow_to_layers is not None:
            model = grow(model, recipe.grow_to_layers)
    else:
        assert recipe.config is not None
        model = build_model(build_config(recipe.config, tokenizer, names), setup.task, dtype)
    if recipe.data.format == "chat":
        from exitserve_training.chats import end_at_turns

        end_at_turns(model, processor)
    if tokenizer is not None:
        check_fits(model.config, tokenizer, recipe.data.sequence_length)
        check_teacher(recipe, setup.task, model.config.vocab_size)
    if recipe.head_from_embeddings:
        start_head_from_embeddings(model)
    if recipe.attn_implementation is not None:
        choose_attention(model, recipe.attn_implementation)
    return model


def _task_inputs(recipe: Recipe, setup: TrainingSetup, processor: Any) -> tuple[TaskInputs, Any]:
    """How batches become inputs and labels, and their collator."""
    match recipe.data.format, setup.task:
        case "images", _:
            changed = Augmentation(recipe.seed) if recipe.data.augment else None
            return ClassOfImage(changed), ImageReader(recipe.data, processor)
        case "labelled", _:
            return class_of_text, DataCollatorWithPadding(with_padding(processor))
        case "chat", _:
            from exitserve_training.chats import chat_collator

            return next_token, chat_collator(recipe, processor)
        case _, "hidden token":
            masking = Masking.of(processor, recipe.mask_share, recipe.seed)
            return MaskedToken(masking), default_data_collator
        case _:
            return next_token, default_data_collator
