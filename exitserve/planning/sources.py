"""Where the costs of a step's parts come from: this machine, or a table. Light to import."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from exitserve.checkpoint import read_config
from exitserve.costs import DTYPE_BYTES, DecoderShape, TokenCosts, shape_of
from exitserve.errors import ExitServeError
from exitserve.planning.devices import SOURCE, device_named, roofline
from exitserve.planning.predict import Curve, StepCosts, rows_to_time

MOST_ROWS = 512
"""Rows up to which batches are planned."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Costs of a model's parts, and where they are from."""

    costs: StepCosts
    shape: DecoderShape
    dtype: str
    measured: bool
    details: dict[str, Any] = field(default_factory=dict)
    """For the report: `bandwidth` (bytes a second) and more."""
    notes: tuple[str, ...] = ()


def read_model(model: str) -> dict[str, Any]:
    """The `config.json` of a directory, a hub id, or the file itself.

    Raises:
        ExitServeError: there is none, or it is no JSON object.
    """
    path = Path(model)
    if not path.is_file():
        return read_config(model)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ExitServeError(f"'{path}' is not valid JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ExitServeError(f"'{path}' must hold a JSON object, as config.json does.")
    return config


def serving_dtype(config: Mapping[str, Any], asked: str | None) -> str:
    """The type that weights are served in: asked for, else the checkpoint's, 32 bits halved.

    Raises:
        ExitServeError: the type asked for is unknown.
    """
    if asked is not None and asked != "auto":
        if asked not in DTYPE_BYTES:
            allowed = ", ".join(("auto", *DTYPE_BYTES))
            raise ExitServeError(f"--dtype {asked!r} is unknown; allowed: {allowed}.")
        return asked
    own = str(config.get("dtype", config.get("torch_dtype"))).removeprefix("torch.")
    # As vLLM does by default: float32 checkpoints are served in bfloat16.
    return "float16" if own == "float16" else "bfloat16"


def step_costs(
    config: Mapping[str, Any],
    *,
    dtype: str | None = None,
    batch_sizes: Sequence[int] = (1,),
    context: int = 0,
    device: str | None = None,
    overhead: float | None = None,
    progress: Callable[[float], None] = lambda done: None,
) -> Source:
    """What the parts of a decode step cost.

    Args:
        config: a parsed `config.json`.
        dtype: that weights and cache are served in; None for the checkpoint's own.
        batch_sizes: numbers of rows that decode together.
        context: tokens that each row's attention reads.
        device: a name in `exitserve.planning.devices.DEVICES`; None to measure this machine.
        overhead: seconds of a step outside the model; None for what is known of the engine.
        progress: called with the share of the measurement that is done, 0..1.

    Raises:
        ExitServeError: a value is wrong, the shape unknown, or too large to be timed here.
    """
    figures = None if device is None else device_named(device)
    served = serving_dtype(config, dtype)
    shape = shape_of(config, served)
    _check(config, shape, served, batch_sizes, context, device)
    notes = _notes_on(config, served, context)
    if figures is None:
        source = _measured(shape, served, batch_sizes, context, progress)
    else:
        source = Source(
            costs=roofline(shape, figures, context, max(batch_sizes)),
            shape=shape,
            dtype=served,
            measured=False,
            details={"device": device, "bandwidth": figures.bandwidth, "peak_flops": figures.peak},
            notes=(
                f"{device}: {SOURCE}. The least that a step takes: no launches, no engine. What is "
                f"measured there will be less.",
            ),
        )
    if overhead is not None:
        rest = Curve(tuple((rows, overhead) for rows, _ in source.costs.rest.points))
        source = replace(source, costs=replace(source.costs, rest=rest))
    return replace(source, notes=(*source.notes, *notes))


def measured_costs(
    config: Mapping[str, Any],
    *,
    dtype: str | None = None,
    batch: int = 1,
    context: int = 0,
    device: str | None = None,
) -> TokenCosts:
    """Seconds that one token costs by part, in a batch whose rows all do the same.

    Arguments and errors as in `step_costs`.
    """
    source = step_costs(config, dtype=dtype, batch_sizes=(batch,), context=context, device=device)
    return source.costs.of_tokens(batch)


def _measured(
    shape: DecoderShape,
    dtype: str,
    batch_sizes: Sequence[int],
    context: int,
    progress: Callable[[float], None],
) -> Source:
    from exitserve.planning.measure import UNSTEADY, measure  # loads torch

    found = measure(shape, dtype, rows_to_time(batch_sizes), context, progress)
    notes = []
    if found.unsteadiness > UNSTEADY:
        notes.append(
            f"the machine was busy or unsteady while this was measured (median over least time of "
            f"a part up to {found.unsteadiness:.2f}): run again when it is quiet."
        )
    details = {
        "bandwidth": found.bandwidth,
        "threads": found.threads,
        "rounds": found.rounds,
        "unsteadiness": round(found.unsteadiness, 3),
    }
    return Source(
        costs=found.costs,
        shape=shape,
        dtype=dtype,
        measured=True,
        details=details,
        notes=tuple(notes),
    )


def _check(
    config: Mapping[str, Any],
    shape: DecoderShape,
    dtype: str,
    batch_sizes: Sequence[int],
    context: int,
    device: str | None,
) -> None:
    if shape.num_layers < 2:
        raise ExitServeError("the model has one layer, so there is nothing to exit before.")
    if device is not None and dtype == "float32":
        raise ExitServeError("--device knows 16-bit figures only; give --dtype bfloat16.")
    longest = config.get("max_position_embeddings", config.get("n_positions"))
    if context < 0 or (isinstance(longest, int) and context > longest):
        raise ExitServeError(f"--context {context} is outside the model's 0..{longest} tokens.")
    if config.get("num_experts_per_tok") and max(batch_sizes) > 1:
        raise ExitServeError(
            "a mixture of experts is planned at batch 1 only, because which experts a larger "
            "batch reads depends on its tokens; give --batch-sizes 1."
        )


def _notes_on(config: Mapping[str, Any], dtype: str, context: int) -> list[str]:
    notes = []
    if config.get("quantization_config"):
        notes.append(
            f"the checkpoint is quantised, and planned as if it were {dtype}: its layers are "
            f"cheaper, so a check costs more of them than told here."
        )
    window = config.get("sliding_window")
    if window and context > window and config.get("use_sliding_window") is not False:
        notes.append("layers with a sliding window are planned as if they read the whole context.")
    return notes
