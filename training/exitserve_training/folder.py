"""The folder of a run: checks before it starts, and the checkpoints to resume from."""

import json
import math
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from exitserve.errors import ExitServeError, shown
from exitserve_training.provenance import FILE as TRAINING_RUN
from exitserve_training.provenance import read_training_run
from exitserve_training.recipe import Recipe

_KEPT = (
    "model",
    "grow_to_layers",
    "config",
    "tokenizer",
    "data",
    "lora",
    "adagc",
    "optimizer",
    "weights",
    "head_from_embeddings",
    "seed",
    *(f"training.{key}" for key in ("optim", "optim_args", "weight_decay")),
    *(f"training.adam_{key}" for key in ("beta1", "beta2", "epsilon")),
)
"""Keys that a resumed run has from its checkpoint: a change of the recipe would have no effect."""
_OF_SESSION = ("output_dir", "resume", "overwrite")

OWN_CHATS = Path("data") / "own-chats.jsonl"
"""What the model wrote for its training, in the folder of a run."""
HELD_OUT = "held-out.jsonl"
"""Chats that were held out, in its data folder."""


def check_output_dir(recipe: Recipe) -> None:
    """Raises `ExitServeError` unless the run may write to its `output_dir`."""
    folder = Path(recipe.output_dir)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(dir=existing):
            pass
    except OSError as error:
        raise ExitServeError(
            f"output_dir '{folder}' cannot be written, for '{existing}' refuses a folder in it: "
            f"{error.strerror}; give another."
        ) from error
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if recipe.resume:
        _check_same_run(recipe, folder)
    elif not recipe.overwrite:
        raise ExitServeError(
            f"output_dir '{folder}' exists and is not empty; give another, or set "
            f"resume=true to continue it, or overwrite=true to replace it."
        )
    elif not (folder / TRAINING_RUN).is_file():
        # `overwrite=true output_dir=.` must not delete a project.
        raise ExitServeError(
            f"output_dir '{folder}' holds no earlier training run (no {TRAINING_RUN}), so "
            f"overwrite=true does not empty it; empty it yourself or give another."
        )


def newest_checkpoint(folder: Path, *, tell: bool = False) -> str | None:
    """The checkpoint to resume from; raises `ExitServeError` where there is none.

    None for a run that has written chats, which take longer than any other beginning: it goes on
    with those. `tell`: whether to print what is wrong with newer ones.
    """
    whole, faults = _newest_whole(folder)
    if whole is None and not (folder / OWN_CHATS).is_file():
        found = f" is whole: {faults[0]}" if faults else ""
        raise ExitServeError(
            f"resume: no checkpoint in '{folder}'{found}; start the run without resume first."
        )
    for fault in faults if tell else ():
        print(f"resume: {fault}, so the run goes on from {whole or 'its chats'}")
    return None if whole is None else str(whole)


def after_failure(folder: Path, step: int) -> str:
    """The end of an error message: what to do after optimizer step `step` failed.

    A checkpoint of that very step holds the weights that failed, so an earlier one is named.
    """
    good, _ = _newest_whole(folder, before=step)
    if good is None:
        return "no earlier checkpoint is kept: lower training.learning_rate and start again."
    return (
        f"the last good checkpoint is '{good}': lower training.learning_rate and give resume=true."
    )


def set_aside(folder: Path, step: int) -> None:
    """Renames the checkpoint whose weights failed, so that no run resumes from it."""
    bad = folder / f"checkpoint-{step}"
    if bad.is_dir():
        aside = folder / f"bad-checkpoint-{step}"
        shutil.rmtree(aside, ignore_errors=True)
        bad.rename(aside)


def _newest_whole(folder: Path, before: float = math.inf) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that a run can go on from, and what is wrong with newer ones."""
    names = {path.name.removeprefix("checkpoint-"): path for path in folder.glob("checkpoint-*")}
    found = {int(step): path for step, path in names.items() if step.isdigit()}
    faults: list[str] = []
    for step in sorted((step for step in found if step < before), reverse=True):
        fault = _fault(found[step])
        if fault is None:
            return found[step], faults
        faults.append(fault)
    return None, faults


def _fault(checkpoint: Path) -> str | None:
    """What keeps a run from going on from there: a crash or a full disk cuts files short."""
    # FSDP has folders instead of files. The Trainer writes its state last.
    for wanted in ("*model*", "optimizer*", "scheduler.pt", "trainer_state.json"):
        if not any(checkpoint.glob(wanted)):
            return f"'{checkpoint}' has no {wanted.strip('*')}"
    for file in sorted(checkpoint.iterdir()):
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, "np"):
                    pass
            elif file.suffix == ".json":
                json.loads(file.read_bytes())
            elif file.suffix in (".pt", ".pth") and not zipfile.is_zipfile(file):
                raise ValueError("cut short")
        except (OSError, SafetensorError, ValueError):
            return f"'{file}' is damaged"
    return None


def empty_folder(recipe: Recipe) -> Path:
    """Makes the folder of a run, emptied if the recipe says so."""
    folder = Path(recipe.output_dir)
    if recipe.overwrite and folder.is_dir():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _check_same_run(recipe: Recipe, folder: Path) -> None:
    """A resumed run keeps its model, data and optimizer; of what else changed it tells."""
    earlier = read_training_run(folder).get("recipe", {})
    given = recipe.model_dump(mode="json")
    changes = dict(_changes(earlier, given)) if earlier else {}
    kept = [key for key in changes if any(f"{key}.".startswith(f"{of}.") for of in _KEPT)]
    if kept:
        listed = ", ".join(f"{key!r} ({changes[key]})" for key in kept)
        raise ExitServeError(
            f"resume: recipe key {listed} differs from the run in '{folder}'; keep what it was, or "
            f"start a new run."
        )
    taken = [f"{key} ({how})" for key, how in changes.items() if key not in _OF_SESSION]
    if taken:
        print(f"resume: from here on the run goes by the recipe's {', '.join(taken)}")


def _changes(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The keys whose values differ, dotted where nested, and how."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**old, **new}:
            yield from _changes(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key, f"{shown(new)} instead of {shown(old)}"
