"""One training run, from recipe to report."""

import atexit
import functools
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import datasets
from accelerate.utils import gather_object
from torch import Tensor, distributed
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback
from transformers.utils import logging

from exitserve.checkpoint.block import MultiExit, read_config, write_multi_exit
from exitserve.checkpoint.exit_rows import most_frequent, save_exit_rows
from exitserve.checkpoint.hub import CARD
from exitserve.costs.byte_costs import shape_of
from exitserve.errors import ExitServeError
from exitserve.reference import eos_ids
from exitserve.reporting.progress import step_bars
from exitserve_training.adapters import FOLDER
from exitserve_training.arguments import NO_DEEPSPEED, training_arguments
from exitserve_training.callbacks import (
    Clock,
    Gradients,
    ProgressLines,
    RunStoppedError,
    StopOnTerm,
    TimeLimit,
)
from exitserve_training.card import model_card
from exitserve_training.folder import after_failure, newest_checkpoint, set_aside
from exitserve_training.preparation import TrainerInputs, prepare
from exitserve_training.recipe import Recipe
from exitserve_training.report import LayerQuality, TrainingReport
from exitserve_training.trainer import ExitTrainer, MultiExitTraining
from exitserve_training.training_setup import TrainingSetup, training_setup
from exitserve_training.verdicts import verdict

FEW_TOKENS = 4096
"""Of held-out text, below which what is measured is rough."""

COUNTED_TOKENS = 10_000_000
"""Of the training text, for the exit rows."""

_AnyCallback = TypeVar("_AnyCallback", bound=TrainerCallback)


def train(recipe: Recipe) -> TrainingReport | None:
    """Trains by a recipe and writes an ordinary checkpoint with reports to `output_dir`.

    Returns the report, or None in a process of a distributed run that is not its first.

    Raises:
        ExitServeError: anything in the recipe that cannot be done, before training starts; a
            loss or gradient that is not finite, which ends the run.
        RunStoppedError: SIGTERM came; says how to go on.
    """
    # Both show bars for what takes no time; the long work has its own bars.
    datasets.disable_progress_bars()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    arguments = _checked_arguments(recipe)
    if arguments.world_size > 1:
        atexit.register(_leave_group)
    setup = training_setup(recipe)
    output_dir = Path(recipe.output_dir)
    is_first = arguments.process_index == 0
    checkpoint = newest_checkpoint(output_dir, tell=is_first) if recipe.resume else None
    # The first process prepares the data and writes it down; the others read that.
    prepared = _first_then_others(is_first, functools.partial(prepare, recipe, setup, is_first))
    trainer = _trainer(recipe, setup, prepared, arguments)
    _check_sharding(recipe, trainer)
    if is_first:
        _warn_of_few(trainer)
    with step_bars() as progress:
        trainer.add_callback(ProgressLines(progress, trainer.time_limit))
        before = {} if checkpoint else _quality(trainer)
        counts_before = None if checkpoint else trainer.exit_counts
        trainer.train(resume_from_checkpoint=checkpoint)
        if checkpoint and is_first and checkpoint.endswith(f"-{trainer.state.global_step}"):
            print("resume: the run is finished; raise training.max_steps for more steps.")
        _check_ended(trainer)
        after = _quality(trainer)
    _check_learned(after, output_dir, trainer.state.global_step, is_first)
    trainer.exits = _with_verdicts(trainer, counts_before)
    # In the dtype that the model was given in, unless the recipe says how weights are kept.
    given: Any = None if recipe.model is None else setup.config.dtype
    trainer.save_result(recipe.output_dir, None if "weights" in recipe.model_fields_set else given)
    if not is_first:
        return None
    _add_exit_rows(trainer, recipe)
    # A pickle of the arguments, which training_run.json holds readably.
    (output_dir / "training_args.bin").unlink(missing_ok=True)
    report = _report(recipe, trainer, prepared, before, after)
    report.write(output_dir)
    if trainer.exits.trained:
        model_card(recipe, report, trainer.exits).save(output_dir / CARD)
    return report


def _leave_group() -> None:
    """Ends the threads that talk to the other processes, which may abort a process at its exit."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _first_then_others(is_first: bool, work: Callable[[], TrainerInputs]) -> TrainerInputs:
    """Works in the first process, then in the others; where one fails, all end.

    The Trainer's `main_process_first` would let the others go on, and wait for the first.
    """
    done: TrainerInputs | None = None
    for turn in (True, False):
        failure: str | None = "a process ended; its message says why"
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
        for message in filter(None, failures):
            raise ExitServeError(message)
    assert done is not None
    return done


def _checked_arguments(recipe: Recipe) -> TrainingArguments:
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise ExitServeError(NO_DEEPSPEED)
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


def _trainer(
    recipe: Recipe, setup: TrainingSetup, prepared: TrainerInputs, arguments: TrainingArguments
) -> MultiExitTraining:
    gradients = Gradients(None if recipe.adagc is None else recipe.adagc.model_dump())
    callbacks: list[TrainerCallback] = [Clock(), gradients, StopOnTerm()]
    common: dict[str, Any] = {
        "model": prepared.model,
        "recipe": recipe,
        "exits": setup.exits,
        "args": arguments,
        "train_dataset": prepared.data["train"],
        "eval_dataset": prepared.data["validation"],
        "processing_class": prepared.processor,
        "callbacks": callbacks,
    }
    if recipe.data.format == "chat":
        from exitserve_training.chats import ChatTrainer

        trainer: MultiExitTraining = ChatTrainer(**common, data_collator=prepared.collator)
    else:
        trainer = ExitTrainer(
            **common, task_inputs=prepared.task_inputs, data_collator=prepared.collator
        )
    if recipe.max_minutes is not None:
        # A resumed run has another clock.
        trainer.time_limit = TimeLimit(
            60 * recipe.max_minutes, lambda: _callback(trainer, Clock).elapsed
        )
        trainer.add_callback(trainer.time_limit)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback):
            # Its constructor takes the folder from the environment only.
            callback.logging_dir = str(Path(recipe.output_dir) / "logs")
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _warn_of_few(trainer: MultiExitTraining) -> None:
    held_out = trainer.labelled_tokens(trainer.eval_dataset)
    if held_out < FEW_TOKENS and trainer.parts.task != "class":
        print(
            f"Warning: only {held_out:,} tokens are held out, so what is measured on them is "
            f"rough; give more data, or raise data.validation_fraction or data.validation_blocks.",
            file=sys.stderr,
        )


def _callback(trainer: MultiExitTraining, kind: type[_AnyCallback]) -> _AnyCallback:
    return next(c for c in trainer.callback_handler.callbacks if isinstance(c, kind))


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
    if recipe.weights == "bfloat16":
        # Accelerate makes what it shards float32 where `bf16` computes.
        raise ExitServeError(
            "weights=bfloat16 would become float32 in FSDP's shards; leave weights out (a shard is "
            "its part of 16 bytes a weight), or use several processes without FSDP."
        )


def _quality(trainer: MultiExitTraining) -> dict[str, LayerQuality]:
    metrics, names = trainer.evaluate(), ("loss", "perplexity", "accuracy")
    return {
        str(layer): LayerQuality(**{name: metrics[f"eval_{name}_layer_{layer}"] for name in names})
        for layer in trainer.eval_layers
    }


def _with_verdicts(trainer: MultiExitTraining, before: Tensor | None) -> MultiExit:
    """The block for the checkpoint, with what the last evaluation found of each exit."""
    # Of a decoder's exits with heads of their own nothing is said, for nothing serves them.
    if trainer.parts.task != "class" and trainer.multi_exit.objectives.classifiers():
        return trainer.exits
    tokens = int(trainer.state.num_input_tokens_seen)
    return replace(
        trainer.exits,
        trained={
            layer: verdict(
                trainer.exit_counts[place], None if before is None else before[place], tokens
            )
            for place, layer in enumerate(trainer.exits.exit_layers)
        },
    )


def _add_exit_rows(trainer: MultiExitTraining, recipe: Recipe) -> None:
    """Counts exit rows in the training text, where the vocabulary is so large that they pay; for
    the checkpoint, and the adapter of a run that leaves one."""
    folder = Path(recipe.output_dir)
    try:
        shape = shape_of(read_config(folder), "bfloat16")
    except ExitServeError:  # of a kind whose costs are not known
        return
    is_served = trainer.parts.task == "next token" and bool(trainer.exits.exit_layers)
    if shape.exit_rows is None or not is_served:
        return
    data: Any = trainer.train_dataset
    step = 1 + len(data) * len(data[0]["input_ids"]) // COUNTED_TOKENS
    texts, ends = data[::step]["input_ids"], eos_ids(trainer.language_model)
    rows = most_frequent(texts, shape.exit_rows, shape.vocab_size, ends)
    adapter = folder / FOLDER
    for place in (folder, adapter) if recipe.lora and adapter.is_dir() else (folder,):
        trainer.exits = replace(trainer.exits, rows=save_exit_rows(place, rows))
        write_multi_exit(place, trainer.exits)


def _check_ended(trainer: MultiExitTraining) -> None:
    """Raises `RunStoppedError` if the run was told to stop before its last step."""
    stop = _callback(trainer, StopOnTerm)
    step, of = trainer.state.global_step, trainer.state.max_steps
    if trainer.time_limit is not None and trainer.time_limit.is_over:
        return
    if stop.asked and step < of:
        raise RunStoppedError(
            f"stopped by SIGTERM after step {step:,} of {of:,}; its work is in "
            f"'{newest_checkpoint(Path(str(trainer.args.output_dir)))}'. To go on: the same "
            f"command with resume=true."
        )


def _check_learned(after: dict[str, LayerQuality], folder: Path, step: int, is_first: bool) -> None:
    """Raises `ExitServeError` if the weights predict nothing, so that they are not saved."""
    bad = [layer for layer, quality in after.items() if not math.isfinite(quality.loss)]
    if bad:
        message = (
            f"after {step} steps the loss at layers {', '.join(bad)} is not finite, so the model "
            f"was not saved; {after_failure(folder, step)}"
        )
        if is_first:
            set_aside(folder, step)
        raise ExitServeError(message)


def _report(
    recipe: Recipe,
    trainer: MultiExitTraining,
    prepared: TrainerInputs,
    before: dict[str, LayerQuality],
    after: dict[str, LayerQuality],
) -> TrainingReport:
    clock = _callback(trainer, Clock)
    return TrainingReport(
        model=Path(recipe.output_dir).name,
        architecture=prepared.architecture,
        parameters=prepared.parameters,
        objectives=[options.name for options in recipe.objectives],
        num_layers=trainer.parts.num_layers,
        exit_layers=list(trainer.exits.exit_layers),
        layers=after,
        last_layer=after[str(trainer.parts.num_layers)],
        exits={str(layer): one for layer, one in (trainer.exits.trained or {}).items()},
        initial_layers=before,
        steps=trainer.state.global_step,
        tokens_seen=int(trainer.state.num_input_tokens_seen),
        seconds=round(clock.elapsed, 1),
        train_tokens=trainer.labelled_tokens(trainer.train_dataset),
        validation_tokens=trainer.labelled_tokens(trainer.eval_dataset),
        says=trainer.parts.task,
        metrics=trainer.measured,
    )
