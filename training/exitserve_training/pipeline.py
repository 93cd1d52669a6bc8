"""One training run, from recipe to report."""

from __future__ import annotations

import atexit
import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from accelerate.utils import gather_object
from torch import distributed
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.integrations.integration_utils import TensorBoardCallback

from exitserve.checkpoint import MultiExit
from exitserve.errors import ExitServeError
from exitserve_training.arguments import training_arguments
from exitserve_training.callbacks import Clock, Gradients
from exitserve_training.folder import (
    after_failure,
    check_output_dir,
    empty_folder,
    newest_checkpoint,
    set_aside,
)
from exitserve_training.losses.weights import counted_layers
from exitserve_training.masking import Masking
from exitserve_training.models import (
    build_config,
    build_model,
    check_fits,
    check_model,
    load_model,
    start_head_from_embeddings,
)
from exitserve_training.objectives import check_layers
from exitserve_training.packing import fingerprint, load_packed, pack_split, save_packed
from exitserve_training.parts import ENCODERS
from exitserve_training.provenance import training_run, write_training_run
from exitserve_training.recipe import Recipe
from exitserve_training.report import LayerQuality, Sample, TrainingReport
from exitserve_training.sources import load_split
from exitserve_training.tokenization import load_tokenizer, train_bpe
from exitserve_training.trainer import ExitTrainer, MultiExitTraining

_SAMPLE_TOKENS = 48


@dataclass(frozen=True)
class Prepared:
    """What a run trains, and on what."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    data: datasets.DatasetDict
    architecture: str
    parameters: int
    """How many the model has, counted while it is whole and itself."""


def run(recipe: Recipe) -> TrainingReport | None:
    """Trains as the recipe says and leaves an ordinary checkpoint with reports in `output_dir`.

    Returns the report, or None in a process of a distributed run that is not its first.

    Raises:
        ExitServeError: anything in the recipe that cannot be done, before training starts; a
            loss or gradient that is not finite, which ends the run.
    """
    # Their bars, for saving a few packed tables, say nothing; ours show the long work.
    datasets.disable_progress_bars()
    arguments = _checked_arguments(recipe)
    if arguments.world_size > 1:
        atexit.register(_leave_group)
    config = _planned_config(recipe)
    exits = _exits(recipe, config)
    output_dir = Path(recipe.output_dir)
    is_first = arguments.process_index == 0
    checkpoint = newest_checkpoint(output_dir) if recipe.resume else None
    # The first process prepares the data and writes it down; the others read that.
    prepared = _first_then_others(is_first, functools.partial(_prepare, recipe, config, is_first))
    trainer = _trainer(recipe, exits, prepared, arguments)
    _check_sharding(recipe, trainer)
    before = {} if checkpoint else _quality(trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    after = _quality(trainer)
    _check_learned(after, output_dir, trainer.state.global_step, is_first)
    trainer.save_result(recipe.output_dir)
    if not is_first:
        return None
    # A pickle of the arguments, which training_run.json holds readably.
    (output_dir / "training_args.bin").unlink(missing_ok=True)
    report = _report(recipe, trainer, prepared, before, after)
    report.write(output_dir)
    return report


def _leave_group() -> None:
    """Ends the threads that talk to the other processes, which may abort a process at its exit."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _first_then_others(is_first: bool, work: Callable[[], Prepared]) -> Prepared:
    """Works in the first process, then in the others; where one fails, all end.

    The Trainer's `main_process_first` would let the others go on, and wait for the first.
    """
    done: Prepared | None = None
    for turn in (True, False):
        failure: str | None = "a process ended; its own message says why"
        failures: list[str | None] = []
        try:
            if turn == is_first:
                done = work()
            failure = None
        except ExitServeError as error:
            failure = f"{error}"
            raise
        finally:
            failures = gather_object([failure])
        for told in filter(None, failures):
            raise ExitServeError(told)
    assert done is not None
    return done


def _checked_arguments(recipe: Recipe) -> TrainingArguments:
    arguments = training_arguments(recipe)
    if arguments.n_gpu > 1:
        raise ExitServeError(
            "one process sees several GPUs; start one process a GPU with `accelerate launch -m "
            "exitserve train ...`, or choose a GPU with CUDA_VISIBLE_DEVICES=0."
        )
    # What `accelerate launch --cpu --num_processes 2` leaves without mpirun: one process.
    asked_for_more = os.environ.get("ACCELERATE_USE_CPU") == "True" and "MASTER_ADDR" in os.environ
    if arguments.world_size == 1 and asked_for_more:
        raise ExitServeError(
            "`accelerate launch --cpu` has started one process, not several; use `torchrun "
            "--nproc-per-node 2 -m exitserve train ...` for several, or leave --num_processes out."
        )
    return arguments


def _planned_config(recipe: Recipe) -> PreTrainedConfig:
    """The model's config as far as it is known before the data are read."""
    if recipe.model is not None:
        return check_model(recipe.model)
    assert recipe.config is not None
    return build_config(recipe.config)


def _exits(recipe: Recipe, config: PreTrainedConfig) -> MultiExit:
    """The block for `config.json`; checks all that the recipe says about layers."""
    num_layers: int = config.num_hidden_layers
    chosen: Sequence[int] | None = None if recipe.exit_layers == "all" else recipe.exit_layers
    layers = counted_layers(num_layers, chosen)[:-1]
    exits = MultiExit(exit_layers=layers, objective="+".join(o.name for o in recipe.objectives))
    exits.validate(num_layers)
    check_layers(recipe.objectives, layers, num_layers)
    if config.model_type in ENCODERS:
        for key in ("exit_aware", "sample_texts"):
            if getattr(recipe, key):
                raise ExitServeError(f"recipe key {key!r} is for causal models; leave it out.")
        if recipe.data.format == "chat":
            raise ExitServeError("data.format=chat is for causal models.")
    elif "mask_share" in recipe.model_fields_set:
        raise ExitServeError("recipe key 'mask_share' is for masked models, such as bert.")
    return exits


def _prepare(recipe: Recipe, config: PreTrainedConfig, is_first: bool) -> Prepared:
    """Reads the data and builds or loads the model; only then is anything on disk touched."""
    if is_first:
        check_output_dir(recipe)
    folder = Path(recipe.output_dir) / "data"
    path = recipe.tokenizer.path if recipe.tokenizer else recipe.model
    source = recipe.tokenizer.model_dump_json() if recipe.tokenizer else str(recipe.model)
    key = fingerprint(recipe.data.model_dump_json(), source, str(recipe.seed))
    from_disk = recipe.resume or not is_first
    data = load_packed(folder, key) if from_disk else None
    source_of_tokenizer = path or (None if data is None else str(folder))
    tokenizer = load_tokenizer(source_of_tokenizer) if source_of_tokenizer else None
    if data is None:
        data, tokenizer = _read_data(recipe, tokenizer, config.model_type in ENCODERS)
    assert tokenizer is not None
    set_seed(recipe.seed)
    if recipe.model is not None:
        model = load_model(recipe.model)
    else:
        assert recipe.config is not None
        model = build_model(build_config(recipe.config, tokenizer))
    check_fits(model.config, tokenizer, recipe.data.sequence_length)
    if recipe.head_from_embeddings:
        start_head_from_embeddings(model)
    if is_first:
        write_training_run(empty_folder(recipe), training_run(recipe))
        if load_packed(folder, key) is None:
            tokenizer.save_pretrained(folder)
            save_packed(folder, key, data)
    return Prepared(model, tokenizer, data, type(model).__name__, model.num_parameters())


def _read_data(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None, is_masked: bool
) -> tuple[datasets.DatasetDict, PreTrainedTokenizerBase]:
    """Chats as they are, or documents packed; trains the tokenizer where there is none."""
    length = recipe.data.sequence_length
    if recipe.data.format == "chat":
        from exitserve_training.chats import load_chats

        if tokenizer is None:
            raise ExitServeError("data.format=chat needs tokenizer.path, or a model with its own.")
        return load_chats(recipe.data, tokenizer, recipe.seed), tokenizer
    split = load_split(recipe.data, recipe.seed)
    if tokenizer is None:
        assert recipe.tokenizer is not None and recipe.tokenizer.train_bpe is not None
        texts = (document.text for document in split.train)
        size = recipe.tokenizer.train_bpe.vocab_size
        tokenizer = train_bpe(texts, size, length, with_mask=is_masked)
    if is_masked and tokenizer.mask_token_id is None:
        raise ExitServeError(
            "this tokenizer has no mask token, which a masked language model needs; set "
            "tokenizer.path to that of a masked model."
        )
    return pack_split(split, tokenizer, length, recipe.data.validation_blocks), tokenizer


def _trainer(
    recipe: Recipe, exits: MultiExit, prepared: Prepared, arguments: TrainingArguments
) -> MultiExitTraining:
    logs = TensorBoardCallback()  # type: ignore[no-untyped-call]
    # Its constructor takes the folder from the environment only.
    logs.logging_dir = str(Path(recipe.output_dir) / "logs")
    common: dict[str, Any] = {
        "model": prepared.model,
        "recipe": recipe,
        "exits": exits,
        "args": arguments,
        "train_dataset": prepared.data["train"],
        "eval_dataset": prepared.data["validation"],
        "processing_class": prepared.tokenizer,
        "callbacks": [Clock(), Gradients.of(recipe.adagc), logs],
    }
    if recipe.data.format == "chat":
        from exitserve_training.chats import ChatTrainer

        return ChatTrainer(**common)
    masking = _masking(recipe, prepared)
    return ExitTrainer(**common, masking=masking, data_collator=default_data_collator)


def _check_sharding(recipe: Recipe, trainer: MultiExitTraining) -> None:
    """Raises `ExitServeError` for what a model in shards cannot do."""
    if not trainer.is_fsdp_enabled:
        return
    if not trainer.accelerator.is_fsdp2:
        # Its parameters stop being parameters in forward: the final norm's gradient is lost.
        raise ExitServeError(
            "FSDP version 1 is not supported; use 2: `accelerate launch --use_fsdp "
            "--fsdp_version 2 ...`, or training.fsdp_config={version: 2} with training.fsdp=true."
        )
    if recipe.adagc is not None:
        raise ExitServeError(
            "adagc needs each gradient whole, and FSDP cuts them; use training.max_grad_norm, or "
            "several processes without FSDP."
        )


def _masking(recipe: Recipe, prepared: Prepared) -> Masking | None:
    if prepared.model.config.model_type not in ENCODERS:
        return None
    tokenizer = prepared.tokenizer
    return Masking(
        share=recipe.mask_share,
        mask_id=int(tokenizer.mask_token_id),
        vocab_size=len(tokenizer),
        special_ids=tuple(tokenizer.all_special_ids),
        seed=recipe.seed,
    )


def _quality(trainer: MultiExitTraining) -> dict[str, LayerQuality]:
    metrics = trainer.evaluate()
    return {
        str(layer): LayerQuality(
            loss=metrics[f"eval_loss_layer_{layer}"],
            perplexity=metrics[f"eval_perplexity_layer_{layer}"],
        )
        for layer in trainer.eval_layers
    }


def _check_learned(after: dict[str, LayerQuality], folder: Path, step: int, is_first: bool) -> None:
    """Raises `ExitServeError` rather than let weights be saved that say nothing."""
    bad = [layer for layer, quality in after.items() if not math.isfinite(quality.loss)]
    if bad:
        message = (
            f"after {step} steps the loss at layers {', '.join(bad)} is not finite, so the model "
            f"was not saved; {after_failure(folder, step)}"
        )
        if is_first:
            set_aside(folder, step)
        raise ExitServeError(message)


def _samples(recipe: Recipe, trainer: MultiExitTraining, prepared: Prepared) -> list[Sample]:
    """Greedy completions, at full depth, in float32."""
    prompts = recipe.sample_texts
    if not prompts:
        return []
    # Of a sharded model this process has a part only.
    sharded = trainer.is_fsdp_enabled
    model = load_model(recipe.output_dir) if sharded else prepared.model
    tokenizer = prepared.tokenizer
    model.train(False)
    generate: Any = model.generate  # loosely typed in transformers
    samples = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
        tokens = generate(
            inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=_SAMPLE_TOKENS,
            do_sample=False,
        )
        new = tokens[0, inputs["input_ids"].shape[1] :]
        completion = str(tokenizer.decode(new, skip_special_tokens=True))
        samples.append(Sample(prompt=prompt, completion=completion))
    return samples


def _report(
    recipe: Recipe,
    trainer: MultiExitTraining,
    prepared: Prepared,
    before: dict[str, LayerQuality],
    after: dict[str, LayerQuality],
) -> TrainingReport:
    clock = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Clock))
    return TrainingReport(
        model=Path(recipe.output_dir).name,
        architecture=prepared.architecture,
        parameters=prepared.parameters,
        objectives=[options.name for options in recipe.objectives],
        num_layers=trainer.parts.num_layers,
        exit_layers=list(trainer.exits.exit_layers),
        layers=after,
        last_layer=after[str(trainer.parts.num_layers)],
        initial_layers=before,
        steps=trainer.state.global_step,
        tokens_seen=int(trainer.state.num_input_tokens_seen),
        seconds=round(clock.elapsed, 1),
        train_tokens=trainer.labelled_tokens(trainer.train_dataset),
        validation_tokens=trainer.labelled_tokens(trainer.eval_dataset),
        metrics=trainer.measured,
        samples=_samples(recipe, trainer, prepared),
    )
