"""One training run, from recipe to report."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.integrations.integration_utils import TensorBoardCallback
from transformers.trainer_utils import get_last_checkpoint

from exitserve.checkpoint import MultiExit
from exitserve.decoder import decoder_parts
from exitserve.errors import ExitServeError, nearest
from exitserve_training.losses.weights import counted_layers
from exitserve_training.models import (
    build_config,
    build_model,
    check_fits,
    check_model,
    load_model,
)
from exitserve_training.objectives import Aligned, Objective, PlainCrossEntropy
from exitserve_training.packing import fingerprint, load_packed, pack_split, save_packed
from exitserve_training.provenance import FILE as TRAINING_RUN
from exitserve_training.provenance import read_training_run, training_run, write_training_run
from exitserve_training.recipe import Recipe
from exitserve_training.report import LayerQuality, Sample, TrainingReport
from exitserve_training.sources import load_split
from exitserve_training.tokenization import load_tokenizer, train_bpe
from exitserve_training.trainer import Clock, ExitTrainer

_OURS = {
    "output_dir": "output_dir",
    "overwrite_output_dir": "overwrite",
    "seed": "seed",
    "data_seed": "seed",
    "bf16": "bf16",
    "resume_from_checkpoint": "resume",
    "torch_compile": "compile_layers",
}
"""Training arguments that the recipe sets by a key of its own."""

_SAMPLE_TOKENS = 48


@dataclass(frozen=True)
class Prepared:
    """What a run trains, and on what."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    data: datasets.DatasetDict
    key: str
    """Names what the packed data were made from."""


def run(recipe: Recipe) -> TrainingReport:
    """Trains as the recipe says and leaves an ordinary checkpoint with reports in `output_dir`.

    Raises:
        ExitServeError: anything in the recipe that cannot be done, before training starts.
    """
    # Their bars, for saving a few packed tables, say nothing; ours show the long work.
    datasets.disable_progress_bars()
    output_dir = Path(recipe.output_dir)
    _check_output_dir(recipe, output_dir)
    arguments = _training_arguments(recipe)
    checkpoint = _newest_checkpoint(output_dir) if recipe.resume else None
    prepared = _prepare(recipe, output_dir)
    objective, exits = _objective(recipe, decoder_parts(prepared.model).num_layers)
    _start_folder(recipe, output_dir, prepared)
    clock = Clock()
    logs = TensorBoardCallback()  # type: ignore[no-untyped-call]
    # Its constructor takes the folder from the environment only.
    logs.logging_dir = str(output_dir / "logs")
    trainer = ExitTrainer(
        model=prepared.model,
        objective=objective,
        exits=exits,
        compile_layers=recipe.compile_layers,
        args=arguments,
        train_dataset=prepared.data["train"],
        eval_dataset=prepared.data["validation"],
        data_collator=default_data_collator,
        processing_class=prepared.tokenizer,
        callbacks=[clock, logs],
    )
    before = {} if checkpoint else _quality(trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    after = _quality(trainer)
    trainer.restore_layers()
    trainer.save_model(recipe.output_dir)
    # A pickle of the arguments, which training_run.json holds readably.
    (output_dir / "training_args.bin").unlink(missing_ok=True)
    report = _report(recipe, trainer, prepared, before, after)
    report.write(output_dir)
    return report


def _check_output_dir(recipe: Recipe, output_dir: Path) -> None:
    if output_dir.is_file():
        raise ExitServeError(f"output_dir '{output_dir}' is a file; give a folder.")
    if not output_dir.is_dir() or not any(output_dir.iterdir()):
        return
    if recipe.resume:
        _check_same_run(recipe, output_dir)
    elif not recipe.overwrite:
        raise ExitServeError(
            f"output_dir '{output_dir}' exists and is not empty; give another, or set "
            f"resume=true to continue it, or overwrite=true to replace it."
        )
    elif not (output_dir / TRAINING_RUN).is_file():
        # `overwrite=true output_dir=.` must not delete a project.
        raise ExitServeError(
            f"output_dir '{output_dir}' holds no earlier training run (no {TRAINING_RUN}), so "
            f"overwrite=true does not empty it; empty it yourself or give another."
        )


def _check_same_run(recipe: Recipe, output_dir: Path) -> None:
    """A resumed run keeps its model and its data; its length and objective may change."""
    earlier = read_training_run(output_dir).get("recipe", {})
    given = recipe.model_dump(mode="json")
    for key in ("model", "config", "tokenizer", "data", "seed"):
        if key in earlier and earlier[key] != given[key]:
            raise ExitServeError(
                f"resume: recipe key {key!r} differs from the run in '{output_dir}' "
                f"({given[key]!r} instead of {earlier[key]!r}); keep it, or start a new run."
            )


def _newest_checkpoint(output_dir: Path) -> str:
    """The checkpoint to resume from; raises `ExitServeError` where there is none."""
    find: Callable[[str], str | None] = get_last_checkpoint
    newest = find(str(output_dir)) if output_dir.is_dir() else None
    if newest is None:
        raise ExitServeError(
            f"resume: no checkpoint in '{output_dir}'; start the run without resume first."
        )
    return newest


def _training_arguments(recipe: Recipe) -> TrainingArguments:
    """The recipe's `training` as Hugging Face arguments, with this project's defaults."""
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    for key in recipe.training:
        if key in _OURS:
            raise ExitServeError(f"recipe key 'training.{key}': set {_OURS[key]!r} instead.")
        if key not in known:
            raise ExitServeError(
                f"recipe key 'training.{key}' is unknown.{nearest(key, sorted(known))} "
                f"Allowed: the fields of transformers.TrainingArguments."
            )
    defaults: dict[str, Any] = {
        "logging_steps": 20,
        "save_total_limit": 2,
        "eval_strategy": "no",
        "include_num_input_tokens_seen": "all",
        # What config.json will say; the training passes ask for no cache themselves.
        "use_cache": True,
        "use_cpu": not torch.cuda.is_available(),
    }
    fixed = {
        "output_dir": recipe.output_dir,
        "seed": recipe.seed,
        "bf16": recipe.bf16,
        # The TensorBoard callback is given explicitly, to choose its folder.
        "report_to": "none",
        "restore_callback_states_from_checkpoint": recipe.resume,
    }
    try:
        arguments = TrainingArguments(**{**defaults, **recipe.training, **fixed})
    except (TypeError, ValueError) as error:
        raise ExitServeError(f"recipe key 'training': {' '.join(str(error).split())}") from error
    if arguments.n_gpu > 1 or arguments.world_size > 1:
        raise ExitServeError(
            "training runs in one process on one device so far; choose one, "
            "for example with CUDA_VISIBLE_DEVICES=0."
        )
    return arguments


def _prepare(recipe: Recipe, output_dir: Path) -> Prepared:
    """Checks everything cheap first, then reads the data and builds or loads the model."""
    if recipe.model is not None:
        check_model(recipe.model)
    path = recipe.tokenizer.path if recipe.tokenizer else recipe.model
    tokenizer = load_tokenizer(path) if path else None
    source = recipe.tokenizer.model_dump_json() if recipe.tokenizer else str(recipe.model)
    key = fingerprint(recipe.data.model_dump_json(), source, str(recipe.seed))
    data = load_packed(output_dir / "data", key) if recipe.resume else None
    if recipe.resume and tokenizer is None:
        tokenizer = load_tokenizer(str(output_dir / "data"))
    if data is None:
        split = load_split(recipe.data, recipe.seed)
        length = recipe.data.sequence_length
        if tokenizer is None:
            assert recipe.tokenizer is not None and recipe.tokenizer.train_bpe is not None
            texts = (document.text for document in split.train)
            tokenizer = train_bpe(texts, recipe.tokenizer.train_bpe.vocab_size, length)
        data = pack_split(split, tokenizer, length, recipe.data.validation_blocks)
    assert tokenizer is not None
    set_seed(recipe.seed)
    if recipe.model is not None:
        model = load_model(recipe.model)
    else:
        assert recipe.config is not None
        model = build_model(build_config(recipe.config, tokenizer))
    check_fits(model.config, tokenizer, recipe.data.sequence_length)
    return Prepared(model, tokenizer, data, key)


def _start_folder(recipe: Recipe, output_dir: Path, prepared: Prepared) -> None:
    """Writes what a resumed run needs; only now is anything on disk touched."""
    if recipe.overwrite and output_dir.is_dir():
        shutil.rmtree(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    write_training_run(output_dir, training_run(recipe))
    if load_packed(output_dir / "data", prepared.key) is None:
        save_packed(output_dir / "data", prepared.key, prepared.data)
        prepared.tokenizer.save_pretrained(output_dir / "data")


def _objective(recipe: Recipe, num_layers: int) -> tuple[Objective, MultiExit]:
    """The objective and the block for `config.json`, whose exit layers are below the last."""
    chosen: Sequence[int] | None = None if recipe.exit_layers == "all" else recipe.exit_layers
    layers = counted_layers(num_layers, chosen)
    exits = MultiExit(exit_layers=layers[:-1], objective=recipe.objective)
    exits.validate(num_layers)
    if recipe.objective == "ce":
        return PlainCrossEntropy(num_layers), exits
    return Aligned(num_layers, layers, recipe.weights, recipe.alternate), exits


def _quality(trainer: ExitTrainer) -> dict[str, LayerQuality]:
    metrics = trainer.evaluate()
    return {
        str(layer): LayerQuality(
            loss=metrics[f"eval_loss_layer_{layer}"],
            perplexity=metrics[f"eval_perplexity_layer_{layer}"],
        )
        for layer in trainer.eval_layers
    }


def _samples(prepared: Prepared, prompts: Sequence[str]) -> list[Sample]:
    """Greedy completions, at full depth, in float32."""
    model, tokenizer = prepared.model, prepared.tokenizer
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
    trainer: ExitTrainer,
    prepared: Prepared,
    before: dict[str, LayerQuality],
    after: dict[str, LayerQuality],
) -> TrainingReport:
    clock = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Clock))
    length = recipe.data.sequence_length
    return TrainingReport(
        model=Path(recipe.output_dir).name,
        architecture=type(prepared.model).__name__,
        parameters=prepared.model.num_parameters(),
        objective=recipe.objective,
        num_layers=trainer.parts.num_layers,
        exit_layers=list(trainer.exits.exit_layers),
        layers=after,
        last_layer=after[str(trainer.parts.num_layers)],
        initial_layers=before,
        steps=trainer.state.global_step,
        tokens_seen=int(trainer.state.num_input_tokens_seen),
        seconds=round(clock.elapsed, 1),
        train_tokens=len(prepared.data["train"]) * length,
        validation_tokens=len(prepared.data["validation"]) * (length - 1),
        samples=_samples(prepared, recipe.sample_texts),
    )
